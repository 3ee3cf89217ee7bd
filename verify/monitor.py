"""The monitor of a simulation: it checks the rules of `invariants.py` for many locks at once.

It sees the true time, the store and every client's beliefs; a client sees none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lockfast.core.lease_state import ALIVE
from lockfast.stores.redis.keys import Keys, keys_of
from lockfast.values import Mode, mode_of
from verify.lock_view import MARKER_MS, LockView, StoredGrant, view_of
from verify.process import Process, state_of
from verify.request_rules import (
    Change,
    denied_for_nothing,
    denied_to_holder,
    granted_to_unreachable,
    not_admitted,
    overtaken,
    overwritten,
    refenced,
)
from verify.server_commands import Entry
from verify.virtual_server import VirtualRedis
from verify.world import ALL_RULES

LOSS_DETECTED_WITHIN = 0.05
"""Seconds of running time within which a client detects that a lease expired (rule TL)."""


class RuleBroken(Exception):
    """A rule was broken; the simulation ends here."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class BelievedLease(NamedTuple):
    """A lease that a client believes it holds, and the epoch of the store that granted it."""

    lock: str
    fence: int
    until: float
    epoch: int
    mode: Mode
    slots: tuple[int, ...]


class Monitor:
    def __init__(self, server: VirtualRedis, locks: tuple[str, ...]) -> None:
        self._server = server
        self._keys: dict[str, Keys] = {name: keys_of(name) for name in locks}
        self._views: dict[str, tuple[list[Entry | None], LockView]] = {}
        self._fences: dict[str, int] = dict.fromkeys(locks, 0)
        self._granted: dict[tuple[str, str], tuple[range, int]] = {}
        self._believed: dict[str, dict[tuple[str, str], BelievedLease]] = {}
        self.epoch = 0
        self.grants = 0

    def _view(self, name: str) -> LockView:
        """The lock as it is now; values are immutable, so the same entries give the same view."""
        data, keys = self._server.data, self._keys[name]
        entries = [data.get(key) for key in keys[:7]]
        known = self._views.get(name)
        if known is None or any(old is not new for old, new in zip(known[0], entries, strict=True)):
            known = self._views[name] = entries, view_of(data, keys)
        return known[1]

    def _live(self, name: str) -> dict[str, StoredGrant]:
        view = self._view(name)
        lock, now_ms = view.lock, self._server.now_ms
        expired = lock is not None and lock.expires_ms is not None and now_ms > lock.expires_ms
        return {} if expired else view.live(self._server.now_us)

    def before_request(self, words: Sequence[bytes]) -> dict[str, LockView]:
        """The locks that a request names, before it is executed."""
        self._server.purge()
        return {name: self._view(name) for name, keys in self._keys.items() if keys.lock in words}

    def after_request(self, before: dict[str, LockView], words: Sequence[bytes], reply: Any) -> None:
        """Check the changes that a request made."""
        channels = {channel for channel, _ in self._server.subscriptions}
        for name, old in before.items():
            change = Change(words, self._server.now_us, old, self._view(name), channels)
            self._check_reply(change, reply)
            if change.after != old:
                self._check_change(name, change)

    def _check_reply(self, change: Change, reply: Any) -> None:
        if text := denied_to_holder(change, reply):
            raise RuleBroken("NL", text)
        if text := denied_for_nothing(change, reply):
            raise RuleBroken("LW", text)

    def _check_change(self, name: str, change: Change) -> None:
        view = change.after
        if text := overwritten(change, [one.holder for one in change.before.grants]):
            raise RuleBroken("OW", f"a request for {name} {text}")
        if (view.lock is not None and view.lock.expires_ms is None) or view.endless:
            raise RuleBroken("ST", f"{name} is {view.owned(change.now_us)} without a ttl")
        if abs(view.marker_error_ms()) > MARKER_MS:
            raise RuleBroken("MK", f"the marker of {name} lasts {view.marker_error_ms():g} ms longer than its grants")
        for grant in change.new_grants():
            self._record_grant(name, grant)
        checks = (("FT", refenced), ("FQ", overtaken), ("FQ", granted_to_unreachable), ("AD", not_admitted))
        for rule, check in checks:
            if text := check(change):
                raise RuleBroken(rule, f"{name}: {text}")

    def _record_grant(self, name: str, grant: StoredGrant) -> None:
        holder, fence = grant.holder, grant.fence
        if fence <= self._fences[name]:
            raise RuleBroken("FT", f"{holder} is granted fence {fence} on {name}, after fence {self._fences[name]}")
        self._granted[name, holder] = range(self._fences[name] + 1, fence + 1), self.epoch
        self._fences[name] = fence
        self.grants += 1

    def check_client(self, process: Process, local_now: float, runs_since: float) -> None:
        """Check the beliefs of a client that has just acted."""
        for rule, text in process.violations:
            if rule in ALL_RULES and not (rule == "FQ" and self.epoch):  # a store that lost its data lost the tickets
                raise RuleBroken(rule, text)
        believed: dict[tuple[str, str], BelievedLease] = {}
        for state in process.lease_states():
            if state.state not in ALIVE:
                continue
            if state.valid_until <= local_now:
                late = local_now - max(state.valid_until, runs_since)
                if late > LOSS_DETECTED_WITHIN:
                    raise RuleBroken("TL", f"{state.holder} lost {state.name} and has not noticed for {late:g} s")
                continue
            granted = self._granted.get((state.name, state.holder))
            if granted is None:
                raise RuleBroken("SG", f"{state.holder} believes that it holds {state.name}, which was never granted")
            fences, epoch = granted
            if state.fence not in fences:
                raise RuleBroken("FT", f"{state.holder} was granted fences {fences} and uses fence {state.fence}")
            mode = mode_of(state.weight, state.limit)
            believed[state.name, state.holder] = BelievedLease(
                state.name, state.fence, state.valid_until, epoch, mode, state.slots
            )
        process.leases[:] = [lease for lease in process.leases if state_of(lease).state in ALIVE]
        if believed:
            self._believed[process.name] = believed
        else:
            self._believed.pop(process.name, None)
        self._check_denied(process)

    def _check_denied(self, process: Process) -> None:
        for holder in process.denied - process.releasing:
            if any(holder in self._live(name) for name in self._keys):
                raise RuleBroken("NL", f"{holder} got “not acquired”, and it is the holder")

    def remove_client(self, process: Process) -> None:
        """A client crashed: it holds nothing."""
        self._believed.pop(process.name, None)

    def check_beliefs(self, local: Callable[[str], float]) -> None:
        """A client that believes, by its own clock, that it holds a lock must be the holder in the store."""
        for name, leases in self._believed.items():
            now = local(name)
            for (lock, holder), lease in leases.items():
                if lease.until <= now or lease.epoch != self.epoch:
                    continue
                grant = self._live(lock).get(holder)
                if grant is None:
                    owned = " and ".join(self._live(lock)) or "nobody"
                    raise RuleBroken("SG", f"{holder} believes that it holds {lock}, which {owned} holds in the store")
                # A downgrade may be under way: the client counts as a reader from the moment it sends the request.
                if (grant.mode is not lease.mode and lease.mode is not Mode.READ) or grant.slots != lease.slots:
                    raise RuleBroken("SG", f"{holder} has {lock} as {lease.mode.value} {lease.slots}, unlike the store")
