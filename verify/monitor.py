"""The monitor of a simulation: it checks the rules of `invariants.py` for many locks at once.

It sees the true time, the store and every client's beliefs; a client sees none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lockfast.core.lease_state import ALIVE
from lockfast.stores.redis.keys import Keys, keys_of
from verify.process import Process, state_of
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


class Monitor:
    def __init__(self, server: VirtualRedis, locks: tuple[str, ...]) -> None:
        self._server = server
        self._keys: dict[str, Keys] = {name: keys_of(name) for name in locks}
        self._fences: dict[str, int] = dict.fromkeys(locks, 0)
        self._granted: dict[str, tuple[range, int]] = {}
        self._believed: dict[str, dict[str, BelievedLease]] = {}
        self.epoch = 0
        self.grants = 0

    def _live(self, name: str) -> Entry | None:
        entry = self._server.data.get(self._keys[name].lock)
        expired = entry is not None and entry.expires_ms is not None and self._server.now_ms > entry.expires_ms
        return None if expired else entry

    def before_request(self) -> dict[str, Entry | None]:
        """The live locks before a request is executed."""
        return {name: self._live(name) for name in self._keys}

    def after_request(self, before: dict[str, Entry | None], words: list[bytes]) -> None:
        """Check the changes that a request made."""
        for name, old in before.items():
            new = self._server.data.get(self._keys[name].lock)
            if old == new:
                continue
            if old is not None and old.value not in words:
                raise RuleBroken("OW", f"{words[-1]!r} changed the lease of {old.value!r} on {name}")
            if new is not None and new.expires_ms is None:
                raise RuleBroken("ST", f"{name} is held by {new.value!r} without a ttl")
            if new is not None and (old is None or old.value != new.value):
                self._record_grant(name, new.value.decode())

    def _record_grant(self, name: str, holder: str) -> None:
        meta = self._server.data[self._keys[name].meta]
        fence = int(meta.value.split(b" ")[0])
        if fence <= self._fences[name]:
            raise RuleBroken("FT", f"{holder} is granted fence {fence} on {name}, after fence {self._fences[name]}")
        self._granted[holder] = range(self._fences[name] + 1, fence + 1), self.epoch
        self._fences[name] = fence
        self.grants += 1

    def check_client(self, process: Process, local_now: float, runs_since: float) -> None:
        """Check the beliefs of a client that has just acted."""
        for rule, text in process.violations:
            if rule in ALL_RULES and not (rule == "FQ" and self.epoch):  # a store that lost its data lost the tickets
                raise RuleBroken(rule, text)
        believed: dict[str, BelievedLease] = {}
        for lease in process.leases:
            state = state_of(lease)
            if state.state not in ALIVE:
                continue
            if state.valid_until <= local_now:
                late = local_now - max(state.valid_until, runs_since)
                if late > LOSS_DETECTED_WITHIN:
                    raise RuleBroken("TL", f"{state.holder} lost {state.name} and has not noticed for {late:g} s")
                continue
            granted = self._granted.get(state.holder)
            if granted is None:
                raise RuleBroken("SG", f"{state.holder} believes that it holds {state.name}, which was never granted")
            fences, epoch = granted
            if state.fence not in fences:
                raise RuleBroken("FT", f"{state.holder} was granted fences {fences} and uses fence {state.fence}")
            believed[state.holder] = BelievedLease(state.name, state.fence, state.valid_until, epoch)
        process.leases[:] = [lease for lease in process.leases if state_of(lease).state in ALIVE]
        if believed:
            self._believed[process.name] = believed
        else:
            self._believed.pop(process.name, None)
        self._check_denied(process)

    def _check_denied(self, process: Process) -> None:
        for holder in process.denied - process.releasing:
            for keys in self._keys.values():
                entry = self._server.data.get(keys.lock)
                if entry is not None and entry.value.decode() == holder:
                    raise RuleBroken("NL", f"{holder} got “not acquired”, and it is the holder")

    def remove_client(self, process: Process) -> None:
        """A client crashed: it holds nothing."""
        self._believed.pop(process.name, None)

    def check_beliefs(self, local: Callable[[str], float]) -> None:
        """A client that believes, by its own clock, that it holds a lock must be the holder in the store."""
        for name, leases in self._believed.items():
            now = local(name)
            for holder, lease in leases.items():
                if lease.until <= now or lease.epoch != self.epoch:
                    continue
                entry = self._live(lease.lock)
                if entry is None or entry.value.decode() != holder:
                    owned = "free" if entry is None else f"held by {entry.value.decode()}"
                    raise RuleBroken(
                        "SG", f"{holder} believes that it holds {lease.lock}, and in the store it is {owned}"
                    )
