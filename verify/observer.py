"""Watches a simulation from outside and says which promise was broken: the rules of `rules.py` for many locks at once.

It knows the true time, the store and every client's beliefs, none of which a client knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lockfast.core.lease_state import ALIVE
from lockfast.stores.redis.keys import Keys, keys_of
from verify.process import Process
from verify.server_commands import Entry
from verify.virtual_server import VirtualRedis
from verify.world import ALL_RULES

TOLD_WITHIN = 0.05
"""Seconds after which a loss has been told (TL), counted from when the process runs."""


class Broken(Exception):
    """A promise was broken; the simulation ends here."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Held(NamedTuple):
    """What somebody takes for its own, and in which life of the store it was granted."""

    lock: str
    fence: int
    until: float
    epoch: int


class Observer:
    def __init__(self, server: VirtualRedis, locks: tuple[str, ...]) -> None:
        self._server = server
        self._keys: dict[str, Keys] = {name: keys_of(name) for name in locks}
        self._fences: dict[str, int] = dict.fromkeys(locks, 0)
        self._granted: dict[str, tuple[range, int]] = {}
        self._held: dict[str, dict[str, Held]] = {}
        self.epoch = 0
        self.grants = 0

    def before(self) -> dict[str, Entry | None]:
        """The locks as they are before a request is executed."""
        now = self._server.now_ms
        found: dict[str, Entry | None] = {}
        for name, keys in self._keys.items():
            entry = self._server.data.get(keys.lock)
            gone = entry is not None and entry.expires_ms is not None and now > entry.expires_ms
            found[name] = None if gone else entry
        return found

    def after(self, before: dict[str, Entry | None], words: list[bytes]) -> None:
        """A request was executed: what did it do to the locks?"""
        for name, old in before.items():
            new = self._server.data.get(self._keys[name].lock)
            if old == new:
                continue
            if old is not None and old.value not in words:
                raise Broken("OW", f"{words[-1]!r} changed the lease of {old.value!r} on {name}")
            if new is not None and new.expires_ms is None:
                raise Broken("ST", f"{name} is {new.value!r}'s without an end")
            if new is not None and (old is None or old.value != new.value):
                self._grant(name, new.value.decode())

    def _grant(self, name: str, holder: str) -> None:
        meta = self._server.data[self._keys[name].meta]
        fence = int(meta.value.split(b" ")[0])
        if fence <= self._fences[name]:
            raise Broken("FT", f"{holder} got fence {fence} on {name} after {self._fences[name]}")
        self._granted[holder] = range(self._fences[name] + 1, fence + 1), self.epoch
        self._fences[name] = fence
        self.grants += 1

    def look(self, process: Process, local_now: float, runs_since: float) -> None:
        """A client acted: what does it take for its own now?"""
        for rule, text in process.problems:
            if rule in ALL_RULES and not (rule == "FQ" and self.epoch):  # a store that forgot knows no tickets
                raise Broken(rule, text)
        held: dict[str, Held] = {}
        for lease in process.leases:
            lease_state = lease._lease_state
            if lease_state.state not in ALIVE:
                continue
            if lease_state.valid_until <= local_now:
                late = local_now - max(lease_state.valid_until, runs_since)
                if late > TOLD_WITHIN:
                    raise Broken(
                        "TL", f"{lease_state.holder} has lost {lease_state.name} and is not told for {late:g} s"
                    )
                continue
            granted = self._granted.get(lease_state.holder)
            if granted is None:
                raise Broken("SG", f"{lease_state.holder} holds {lease_state.name}, which was never granted to it")
            if lease_state.fence not in granted[0]:
                raise Broken(
                    "FT", f"{lease_state.holder} was granted {granted[0]} and takes {lease_state.fence} for it"
                )
            held[lease_state.holder] = Held(lease_state.name, lease_state.fence, lease_state.valid_until, granted[1])
        process.leases[:] = [lease for lease in process.leases if lease._lease_state.state in ALIVE]
        if held:
            self._held[process.name] = held
        else:
            self._held.pop(process.name, None)
        self._refused(process)

    def _refused(self, process: Process) -> None:
        for holder in process.refused - process.releasing:
            for keys in self._keys.values():
                entry = self._server.data.get(keys.lock)
                if entry is not None and entry.value.decode() == holder:
                    raise Broken("NL", f"{holder} was told that it has not got the lock, and it has")

    def gone(self, process: Process) -> None:
        """A client crashed: it holds nothing."""
        self._held.pop(process.name, None)

    def check(self, local: Callable[[str], float]) -> None:
        """Whoever takes a lock for its own, by its own clock, must be the one whom the store has."""
        for name, leases in self._held.items():
            now = local(name)
            for holder, held in leases.items():
                if held.until <= now or held.epoch != self.epoch:
                    continue
                entry = self._server.data.get(self._keys[held.lock].lock)
                expired = entry is not None and entry.expires_ms is not None and self._server.now_ms > entry.expires_ms
                if entry is None or expired or entry.value.decode() != holder:
                    whose = "free" if entry is None or expired else f"{entry.value.decode()}'s"
                    raise Broken("SG", f"{holder} holds {held.lock} by its clock, but in the store it is {whose}")
