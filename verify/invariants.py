"""The invariants: rules that hold in every state of a model and for every request that a server executes.

    ME  mutual exclusion: at most one client believes, by its own clock, that it holds the lock
    SG  store agrees: a client that believes that it holds the lock is the holder in the store
    FT  fencing token: each grant has a greater fence than all earlier ones, and its holder has that fence
    OW  ownership: a request never changes the lease of a holder that it does not name
    NL  no lost grant: a client that got "not acquired" is not the holder in the store, unless it tried to release
    LW  lost wake-up: no waiter sleeps while the lock is free: 50 ms at most, one poll interval if a message was lost
    FQ  fair queue: a later ticket never overtakes a reachable waiter, and a ticket never changes
    CL  clean-up: a client that timed out, was cancelled or released leaves no grant or ticket, if no message was lost
    CF  clean-up under faults: the same even if messages were lost
    ST  no stuck lock: the lock is never held for ever
    AL  alive lease: an acquisition never returns an expired lease
    RL  release: the release of a valid lease returns True, even if a reply was lost
    KP  keepalive: a renewed lease is not lost without a fault
    BD  bounded wait: without a fault, a wait ends within 100 ms of its timeout
    ER  errors: an operation raises only its documented errors

A model checks the rules that it names; each broken lock of the gallery breaks one.
"""

from __future__ import annotations

import itertools
import math
from hashlib import sha1
from typing import NamedTuple

from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.lua.scripts import ACQUIRE
from lockfast.stores.redis.protocol.resp import Reader
from verify.server_commands import Entry
from verify.virtual_server import START_US
from verify.world import (
    CANCEL,
    CRASH,
    CRASHED,
    FAULTS,
    PAUSE,
    RUNNING,
    ClientState,
    ProcessState,
    State,
    World,
)

SOON_US = 50_000
POLL_US = 1_010_000
HARMLESS = frozenset({CRASH, PAUSE, CANCEL})
"""Faults that lose no message, so they do not excuse a late wake-up."""
HOLDER, TICKET = 10, 15
"""Positions in an EVALSHA request of acquire.lua."""

Clients = list[tuple[int, ClientState, ProcessState]]


class Violation(NamedTuple):
    rule: str
    text: str


class RecordedGrant(NamedTuple):
    """One grant of the store."""

    holder: str
    fence: int
    epoch: int


class Invariants:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rules = world.model.rules
        keys = keys_of(world.model.lock)
        self._lock, self._queue, self._waiters = keys.lock, keys.queue, keys.waiters
        self._fence_key = world.model.fence_key or keys.meta
        self._faults = tuple(world.model.faults.get(name, 0) for name in FAULTS)
        self._acquire = sha1(ACQUIRE.text, usedforsecurity=False).hexdigest().encode()
        self._denials: dict[tuple[int, int, int, int], bool] = {}
        self._keys: dict[int, dict[bytes, Entry]] = {}

    def _data(self, server: int) -> dict[bytes, Entry]:
        found = self._keys.get(server)
        if found is None:
            found = self._keys[server] = dict(self._world.snapshots.values[server].keys)
        return found

    # The effect of one request.

    def after_request(self, state: State, index: int, request: int, then: State) -> tuple[State, Violation | None]:
        """`then` with the grant recorded that a client's request made, and the rule that the request broke."""
        if self._world.model.servers > 1:
            return then, None
        if "NL" in self._rules and (denied := self._denied_to_holder(state, index, request, then)):
            return then, denied
        if state.servers == then.servers:
            return then, None
        before, after = self._data(state.servers[0]), self._data(then.servers[0])
        old, new = before.get(self._lock), after.get(self._lock)
        if old == new:
            return then, None
        broken = self._overwritten(old, new, index, request)
        if new is not None and (old is None or old.value != new.value):
            then, fault = self._granted(new.value.decode(), before, after, then, request)
            broken = broken or fault
        return then, broken

    def _overwritten(self, old: Entry | None, new: Entry | None, index: int, request: int) -> Violation | None:
        if "OW" not in self._rules or old is None or self._client_of(old.value) in (None, index):
            return None
        if old.value in self._words(request):
            return None
        victim, culprit = old.value.decode(), self._world.clients[index].name
        verb = "deleted" if new is None else "overwrote" if new.value != old.value else "changed the ttl of"
        return Violation("OW", f"{culprit} {verb} the lease of {victim}, and its request does not name {victim}")

    def _denied_to_holder(self, state: State, index: int, request: int, then: State) -> Violation | None:
        """A claim that is answered "taken" or "queued" although its sender is the holder."""
        key = (state.servers[0], request, index, state.now)
        if key not in self._denials:
            words = self._words(request)
            lock = self._data(then.servers[0]).get(self._lock)
            reply = self._world.replies.values[self._world.execute(*key).reply]
            holds = lock is not None and words[1] == self._acquire and lock.value == words[HOLDER]
            self._denials[key] = holds and isinstance(reply, list)
        if not self._denials[key]:
            return None
        return Violation("NL", f"{self._words(request)[HOLDER].decode()} is denied the lock, and it is the holder")

    def _words(self, request: int) -> list[bytes]:
        (words,) = Reader().feed(self._world.requests.values[request])
        return list(words)

    def _client_of(self, holder: bytes) -> int | None:
        return self._world.index_of.get(holder.decode("utf-8", "replace")[:1])

    def _granted(
        self, holder: str, before: dict[bytes, Entry], after: dict[bytes, Entry], then: State, request: int
    ) -> tuple[State, Violation | None]:
        epoch, grants = self._world.grants.values[then.grants]
        stored = after.get(self._fence_key)
        fence = int(stored.value.split(b" ")[0]) if stored is not None else 0
        # A re-asserted grant replaces the one that the server lost.
        grants = tuple(one for one in grants if (one.holder, one.fence) != (holder, fence))
        then = self._record(then, epoch, grants, holder, fence)
        if "FT" in self._rules and grants and fence <= max(one.fence for one in grants):
            return then, Violation("FT", f"{holder} is granted fence {fence}, after fence {grants[-1].fence}")
        if "FQ" in self._rules:
            return then, self._unfair(holder, before, then, request)
        return then, None

    def _record(self, state: State, epoch: int, grants: tuple[RecordedGrant, ...], holder: str, fence: int) -> State:
        recorded = (*grants, RecordedGrant(holder, fence, epoch))
        return state._replace(grants=self._world.grants.number((epoch, recorded)))

    def _unfair(self, holder: str, before: dict[bytes, Entry], then: State, request: int) -> Violation | None:
        if first := self._overtaken(holder, before, then, self._own_ticket(holder, request)):
            return Violation("FQ", f"{holder} is granted the lock, although {first} is reachable and has waited longer")
        if holder.encode() in self._words(request) or self._waiters not in before:
            return None
        entry = dict(before[self._waiters].value).get(holder.encode())
        if entry is None or not self._reachable(entry, then):
            return Violation("FQ", f"the lock is handed off to {holder}, which is unreachable or whose ticket expired")
        return None

    def _reachable(self, entry: bytes, then: State) -> bool:
        """Whether a waiter's inbox has a subscriber and its last request is younger than its ttl."""
        parts = entry.split(b" ")
        channels = {channel for channel, _ in self._world.snapshots.values[then.servers[0]].subscriptions}
        return parts[3] in channels and int(parts[2]) * 1000 > START_US + then.now

    def _own_ticket(self, holder: str, request: int) -> float:
        """The ticket that the holder's own request presents, from an earlier position in the queue."""
        words = self._words(request)
        own = len(words) > TICKET and words[1] == self._acquire and words[HOLDER] == holder.encode()
        return float(words[TICKET]) if own and words[TICKET] else math.inf

    def _overtaken(self, holder: str, before: dict[bytes, Entry], then: State, ticket: float) -> str | None:
        if self._queue not in before or self._waiters not in before:
            return None
        waiters = dict(before[self._waiters].value)
        for queued, member in before[self._queue].value:
            if member.decode() == holder or ticket <= queued:
                return None
            if self._reachable(waiters.get(member, b"0 0 0 - -"), then):
                return str(member.decode())
        return None

    # One state.

    def in_state(self, state: State) -> Violation | None:
        clients = list(self._world.each_client(state))
        no_fault = state.faults == self._faults
        for index, _, process in clients:
            name, violation = self._world.clients[index].name, process.violation
            if violation is not None and violation[0] in self._rules and (no_fault or violation[0] != "BD"):
                return Violation(violation[0], f"{name}: {violation[1]}")
            if process.lost and no_fault and "KP" in self._rules:
                return Violation("KP", f"{name} lost a lease that its keepalive should have renewed")
        broken = self._wrong_belief(state, clients)
        if broken is not None:
            return broken
        if self._world.model.servers > 1:
            return self._at_rest(state, None, clients) if "CF" in self._rules else None
        lock = self._data(state.servers[0]).get(self._lock)
        return self._denied_holder(lock, clients) or self._at_rest(state, lock, clients)

    def _wrong_belief(self, state: State, clients: Clients) -> Violation | None:
        epoch, grants = self._world.grants.values[state.grants]
        grant_of = {one.holder: one for one in grants}
        floors = {one.holder: earlier.fence for earlier, one in itertools.pairwise(grants)}
        holders: list[str] = []
        for _, client, process in clients:
            if client.status == CRASHED or not process.beliefs:
                continue
            for belief, end in process.beliefs:
                if end is not None and state.now >= end:
                    continue
                if self._world.model.servers > 1:
                    holders.append(belief.holder)
                    continue
                grant = grant_of.get(belief.holder)
                if grant is None or grant.epoch == epoch:
                    holders.append(belief.holder)
                floor = floors.get(belief.holder, 0)
                fault = self._contradicted(state, belief.holder, belief.fence, floor, grant, epoch)
                if fault is not None:
                    return fault
        if len(holders) > 1 and "ME" in self._rules:
            return Violation("ME", f"{' and '.join(sorted(holders))} hold the lock at the same time")
        return None

    def _contradicted(
        self, state: State, holder: str, fence: int, floor: int, grant: RecordedGrant | None, epoch: int
    ) -> Violation | None:
        # A grant may reserve several fences: those above the previous grant's fence, up to its own.
        if "FT" in self._rules and grant is not None and not floor < fence <= grant.fence:
            return Violation("FT", f"{holder} was granted fence {grant.fence} and uses fence {fence}")
        if "SG" not in self._rules:
            return None
        if grant is None:
            return Violation("SG", f"{holder} believes that it holds the lock, and the store never granted it")
        lock = self._data(state.servers[0]).get(self._lock)
        if grant.epoch == epoch and (lock is None or lock.value.decode() != holder):
            return Violation("SG", f"{holder} believes that it holds the lock, and in the store it is {_owned(lock)}")
        return None

    def _denied_holder(self, lock: Entry | None, clients: Clients) -> Violation | None:
        if lock is None or "NL" not in self._rules:
            return None
        holder = lock.value.decode()
        if any(holder in process.denied for _, _, process in clients):
            return Violation("NL", f"{holder} got “not acquired”, and it is the holder")
        return None

    def _at_rest(self, state: State, lock: Entry | None, clients: Clients) -> Violation | None:
        """Check the rules for a state without messages in flight and without timers that are due."""
        for _, client, process in clients:
            if client.status == CRASHED:
                continue
            if client.status != RUNNING or client.requests or client.replies or client.notifications:
                return None
            if any(due <= state.now for _, due in process.timers):
                return None
        if state.detached:
            return None
        return (
            self._asleep(state, lock, clients) or self._stuck(lock, clients) or self._left_behind(state, lock, clients)
        )

    def _asleep(self, state: State, lock: Entry | None, clients: Clients) -> Violation | None:
        if "LW" not in self._rules:
            return None
        waiting = [
            (index, process) for index, client, process in clients if client.status == RUNNING and process.waiting
        ]
        if lock is not None:  # a waiter whose grant notification was lost sleeps, too
            holder = lock.value.decode()
            waiting = [(index, one) for index, one in waiting if holder in one.holder_ids and not one.beliefs]
        if not waiting:
            return None
        wakes = min((due for _, process in waiting for _, due in process.timers), default=None)
        limit = SOON_US if self._faults_spent(state) <= HARMLESS else POLL_US
        if wakes is not None and wakes <= state.now + limit:
            return None
        names = " and ".join(self._world.clients[index].name for index, _ in waiting)
        until = "for ever" if wakes is None else f"for another {(wakes - state.now) / 1e6:g} s"
        return Violation("LW", f"the lock is available, and {names} will sleep {until}")

    def _faults_spent(self, state: State) -> set[int]:
        return {at for at, (left, had) in enumerate(zip(state.faults, self._faults, strict=True)) if left != had}

    def _stuck(self, lock: Entry | None, clients: Clients) -> Violation | None:
        if "ST" not in self._rules or lock is None or lock.expires_ms is not None:
            return None
        if any(client.status == RUNNING and (process.beliefs or process.working) for _, client, process in clients):
            return None
        return Violation("ST", f"the lock is {_owned(lock)} for ever: it has no ttl, and no client will delete it")

    def _left_behind(self, state: State, lock: Entry | None, clients: Clients) -> Violation | None:
        if "CF" in self._rules:
            return self._left_on_a_server(state, clients)
        if "CL" not in self._rules or not self._faults_spent(state) <= {CANCEL}:
            return None
        entry = self._data(state.servers[0]).get(self._queue)
        queue = [] if entry is None else [member.decode() for _, member in entry.value]
        for index, _, process in clients:
            if not (process.done and process.idle):
                continue
            name = self._world.clients[index].name
            if lock is not None and lock.value.decode() in process.holder_ids:
                return Violation("CL", f"{name} has finished, and the lock is still {_owned(lock)}")
            if any(holder in process.holder_ids for holder in queue):
                return Violation("CL", f"{name} has finished, and still has a ticket in the queue")
        return None

    def _left_on_a_server(self, state: State, clients: Clients) -> Violation | None:
        for number, server in enumerate(state.servers):
            lock = self._data(server).get(self._lock)
            for index, client, process in clients:
                finished = client.status == RUNNING and process.done and process.idle
                if lock is not None and finished and lock.value.decode() in process.holder_ids:
                    name = self._world.clients[index].name
                    return Violation("CF", f"{name} has finished, and server S{number} still has its lock")
        return None

    # Fences of a lock on several servers: no single server knows the order of the grants.

    def after_belief(self, before: State, then: State) -> tuple[State, Violation | None]:
        """`then` with the leases recorded that a client began to believe in by this transition."""
        if self._world.model.servers == 1 or "FT" not in self._rules or before.clients == then.clients:
            return then, None
        pairs = zip(self._world.each_client(before), self._world.each_client(then), strict=True)
        for (_, _, old), (_, _, new) in pairs:
            if old is not new and new.beliefs and not old.beliefs:
                holder, fence, _ = new.beliefs[0][0]
                epoch, grants = self._world.grants.values[then.grants]
                then = self._record(then, epoch, grants, holder, fence)
                if grants and fence <= max(one.fence for one in grants):
                    last = grants[-1]
                    return then, Violation("FT", f"{holder} has fence {fence}, after {last.holder} had {last.fence}")
        return then, None


def _owned(lock: Entry | None) -> str:
    return "free" if lock is None else f"held by {lock.value.decode()}"
