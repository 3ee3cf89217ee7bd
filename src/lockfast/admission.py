"""Admission: may a claim be granted now? One rule for every primitive.

    claim                                     admitted when no earlier waiter is in the queue, and
    exclusive (lock, rlock, writer)           there is no live grant
    read                                      every live grant is a read
    permits (semaphore), weight k, limit n    every live grant has permits, and they have at most n - k together

Rules:

- The queue is strictly first come, first served: only its head is admitted. After a release, an expiry or the departure
  of a waiter, the store grants from the head for as long as the head is admitted. So readers enter in one batch, a
  waiting writer stops later readers, and nobody overtakes a claim for many permits.
- Permits in use are counted from the live grants, never kept in a counter beside them.
- The limit belongs to the claim. If deployments disagree for a while, each claim is admitted by its own limit.
- A permit has a slot: the lowest index that no live grant has.
- Readers and permits of the same name exclude each other. A claim that finds the lock held in the other shared mode is
  refused, because the name is probably used by mistake; one that is already queued waits.

The memory store, SQLite, etcd and ZooKeeper call these functions. The Lua scripts follow the same rules, and tests
compare them on random histories.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count, islice
from typing import NamedTuple

from lockfast.errors import ConfigurationError, shown
from lockfast.values import Claim, Mode


class LiveGrant(NamedTuple):
    """A grant that has not expired, as admission sees it. `expires_at` is None if it never expires."""

    mode: Mode
    slots: tuple[int, ...]
    expires_at: float | None


def admit(grants: Collection[LiveGrant], claim: Claim, *, queued_before: bool = False) -> tuple[int, ...] | None:
    """Return the slots of the new grant, none unless it has permits; None if the claim must wait.

    >>> gpu = Claim("gpu", "moto", 30.0, "", weight=2, limit=4)
    >>> admit([LiveGrant(Mode.PERMITS, (0, 2), 30.0)], gpu)
    (1, 3)
    >>> admit([LiveGrant(Mode.PERMITS, (0, 1, 2), 30.0)], gpu) is None
    True
    """
    mode = claim.mode
    if queued_before:
        return None
    if mode is Mode.EXCLUSIVE:
        return None if grants else ()
    if any(grant.mode is not mode for grant in grants):
        return None
    if mode is Mode.READ:
        return ()
    used = {slot for grant in grants for slot in grant.slots}
    if len(used) + claim.weight > claim.limit:
        return None
    return tuple(islice((slot for slot in count() if slot not in used), claim.weight))


def refuse_other_mode(grants: Collection[LiveGrant], claim: Claim) -> None:
    """Raise if the lock is held in the other shared mode.

    >>> reader = Claim("gpu", "moto", 30.0, "", weight=1)
    >>> refuse_other_mode([LiveGrant(Mode.PERMITS, (0,), 30.0)], reader)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lockfast.errors.ConfigurationError: 'gpu' is in use as a semaphore, so it cannot be a read/write lock...
    """
    compatible = (Mode.EXCLUSIVE, claim.mode)
    for grant in grants:
        if claim.weight and grant.mode not in compatible:
            raise other_mode_error(claim.name, grant.mode)


def other_mode_error(name: str, held: Mode) -> ConfigurationError:
    """The error of a shared claim that finds the lock held in the other shared mode."""
    used, wanted = "a semaphore", "a read/write lock"
    if held is Mode.READ:
        used, wanted = wanted, used
    return ConfigurationError(
        f"{shown(name)} is in use as {used}, so it cannot be {wanted} at the same time. Nothing was changed. Use "
        "another name for one of them."
    )


def free_at(grants: Collection[LiveGrant], claim: Claim) -> float | None:
    """When expired grants may let the claim in, if none is renewed: the time for its next poll. None if never.

    Each grant of permits that expires may free enough of them. Every other claim needs all grants gone.

    >>> live = [LiveGrant(Mode.PERMITS, (0,), 10.0), LiveGrant(Mode.PERMITS, (1,), 20.0)]
    >>> free_at(live, Claim("gpu", "moto", 30.0, "", weight=1, limit=2)), free_at(live, Claim("gpu", "moto", 30.0, ""))
    (10.0, 20.0)
    """
    ends = [grant.expires_at for grant in grants if grant.expires_at is not None]
    if len(ends) < len(grants) or not ends:
        return None
    shares_permits = claim.mode is Mode.PERMITS and all(grant.mode is Mode.PERMITS for grant in grants)
    return min(ends) if shares_permits else max(ends)
