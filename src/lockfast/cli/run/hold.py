"""The lock while the command runs: taken at once and without the library where that can be, else as a lease.

Rules kept here: a lock that was taken without the library is handed to it before a renewal is due, with the same holder
and fence; a lease that is at risk counts as lost while there is still time to end the command before others can hold
the lock.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from lockfast.cli.run.options import Options
    from lockfast.client.lease import Lease

LOAD_AFTER = 1.0
"""Seconds that a command may take before the library is loaded to look after its lease."""


class QuickHold:
    """A lock of the embedded store that nobody renews yet."""

    lost = ""

    def __init__(self, options: Options, grant: Any) -> None:
        self._options = options
        self._grant = grant
        self.fence = grant.fence
        self.holder = grant.holder
        self.load_at = time.monotonic() + min(LOAD_AFTER, grant.ttl / 6)

    def load(self, wake: Callable[[], None]) -> LeaseHold:
        """The same lock as a lease that is kept alive."""
        grant = self._grant
        locks = connected(self._options)
        lease = locks._resume(
            grant.name,
            grant.holder,
            grant.fence,
            grant.sent_at,
            lock_options(self._options) | {"on_lost": lambda _: wake(), "on_risk": lambda _: wake()},
        )
        grant.close()
        return LeaseHold(self._options, lease, lease.release)

    def give_back(self, code: int) -> None:
        if not self._grant.release():
            self.load(lambda: None).give_back(code)


class LeaseHold:
    """A lease, and how to end it."""

    load_at: float | None = None

    def __init__(self, options: Options, lease: Lease, release: Callable[[], object]) -> None:
        self._lease = lease
        self._release = release
        self._lead = min(options.grace, options.ttl / 3)
        self.fence = lease.fence
        self.holder = lease.holder

    @property
    def lost(self) -> str:
        """Why the command may not go on; empty while it may."""
        state = self._lease.state.value
        if state == "lost":
            return self._lease._lease_state.reason or "it is no longer ours"
        if state == "at risk" and self._lease.remaining < self._lead:
            return "it cannot be renewed, and would soon be another's"
        return ""

    def give_back(self, code: int) -> None:
        self._release()


class OnceHold(LeaseHold):
    """The lease of a job that one of many runs; how it ended decides how long the others stay away."""

    def __init__(self, options: Options, lease: Lease, once: Any) -> None:
        super().__init__(options, lease, lambda: None)
        self._once = once

    def give_back(self, code: int) -> None:
        end = SystemExit(code)
        self._once.__exit__(type(end), end, None)


def connected(options: Options) -> Any:
    """The library's connection; its warnings are left out, since the command says what matters itself."""
    import logging

    import lockfast

    logging.getLogger("lockfast").setLevel(logging.ERROR)
    return lockfast.connect(options.url, label=options.shown_label)


def lock_options(options: Options) -> dict[str, Any]:
    """What the library is told about the lock."""
    return {"ttl": options.ttl, "max_hold": options.max_hold}


def take_at_once(options: Options) -> QuickHold | None:
    """The lock, if it is free and a matter of one statement in the embedded store."""
    if options.once or options.max_hold is not None:
        return None
    from lockfast.client.connect import take_at_once as take

    grant = take(options.url, options.name, options.ttl, options.shown_label)
    return None if grant is None else QuickHold(options, grant)
