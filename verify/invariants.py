"""The invariants: rules that hold in every state of a model and for every request that a server executes.

    ME  mutual exclusion, by the clocks of the clients: a client that holds a lock exclusively is alone; readers and
        permits do not mix; permits do not exceed the limit of the claim that was admitted last; a slot has one holder
    SG  store agrees: a client that believes that it holds the lock is a holder in the store, in that mode
    FT  fencing token: each grant has a greater fence than all earlier ones, keeps it, and its holder has that fence
    AD  admission: the store makes only those grants that `admission.py` admits, with the same slots
    OW  ownership: a request never changes the lease of a holder that it does not name
    NL  no lost grant: a client that got "not acquired" is not a holder in the store, unless it tried to release
    LW  lost wake-up: no waiter sleeps while the lock is available to it: 50 ms at most, one poll interval if a message
        was lost or a dead waiter is ahead; and no claim has to wait for nothing
    FQ  fair queue: a later ticket never overtakes a reachable waiter, and a ticket never changes
    CL  clean-up: a client that timed out, was cancelled or released leaves no grant or ticket, if no message was lost
    CF  clean-up under faults: the same even if messages were lost
    ST  no stuck lock: the lock is never held for ever, and no key of its grants stays for ever
    MK  marker: the key of a shared lock lasts as long as the longest grant, within 2 ms
    AL  alive lease: an acquisition never returns an expired lease
    RL  release: the release of a valid lease returns True, even if a reply was lost
    KP  keepalive: a renewed lease is not lost without a fault
    BD  bounded wait: without a fault, a wait ends within 100 ms of its timeout
    DL  deadlock: no two clients wait for each other's leases
    ER  errors: an operation raises only its documented errors

A model checks the rules that it names; each broken lock of the gallery breaks one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.protocol.resp import Reader
from lockfast.values import Claim, Mode, mode_of
from verify.lock_view import MARKER_MS, LockView, StoredGrant, admissible, view_of
from verify.process import Belief
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

Clients = list[tuple[int, ClientState, ProcessState]]


class Violation(NamedTuple):
    rule: str
    text: str


class RecordedGrant(NamedTuple):
    """One grant of the store."""

    lock: str
    holder: str
    fence: int
    epoch: int


class Verdict(NamedTuple):
    """The grants that a request made, by lock, and the rule that it broke whatever happened before."""

    granted: tuple[tuple[str, StoredGrant], ...]
    violation: Violation | None


class Invariants:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rules = world.model.rules
        self._locks = {name: keys_of(name) for name in world.model.locks}
        self._faults = tuple(world.model.faults.get(name, 0) for name in FAULTS)
        self._views: dict[tuple[int, str], LockView] = {}
        self._channels: dict[int, frozenset[bytes]] = {}
        self._verdicts: dict[tuple[int, int, int, int], Verdict] = {}

    def _view(self, server: int, name: str) -> LockView:
        found = self._views.get((server, name))
        if found is None:
            data = dict(self._world.snapshots.values[server].keys)
            found = view_of(data, self._locks[name], self._world.model.fence_key)
            self._views[server, name] = found
        return found

    def _subscribed(self, server: int) -> frozenset[bytes]:
        found = self._channels.get(server)
        if found is None:
            subscriptions = self._world.snapshots.values[server].subscriptions
            found = self._channels[server] = frozenset(channel for channel, _ in subscriptions)
        return found

    # The effect of one request.

    def after_request(self, state: State, index: int, request: int, then: State) -> tuple[State, Violation | None]:
        """`then` with the grants recorded that a client's request made, and the rule that the request broke."""
        if self._world.model.servers > 1:
            return then, None
        key = (state.servers[0], request, index, state.now)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._judge(*key)
        broken = verdict.violation
        for name, grant in verdict.granted:
            then, fault = self._granted(name, grant, then)
            broken = broken or fault
        return then, broken

    def _judge(self, server: int, request: int, index: int, now: int) -> Verdict:
        """Check how a request changes each lock that it names."""
        (words,) = Reader().feed(self._world.requests.values[request])
        effect = self._world.execute(server, request, index, now)
        granted: list[tuple[str, StoredGrant]] = []
        broken: Violation | None = None
        for name, keys in self._locks.items():
            if keys.lock in words:
                before, after = self._view(server, name), self._view(effect.server, name)
                change = Change(words, START_US + now, before, after, self._subscribed(effect.server))
                broken = broken or self._denied(change, self._world.replies.values[effect.reply])
                if before != after:
                    granted += [(name, grant) for grant in change.new_grants()]
                    broken = broken or self._changed(index, change)
        return Verdict(tuple(granted), broken)

    def _denied(self, change: Change, reply: object) -> Violation | None:
        if "NL" in self._rules and (text := denied_to_holder(change, reply)):
            return Violation("NL", text)
        if "LW" in self._rules and (text := denied_for_nothing(change, reply)):
            return Violation("LW", text)
        return None

    def _changed(self, index: int, change: Change) -> Violation | None:
        if "OW" in self._rules:
            others = [one.holder for one in change.before.grants if self._client_of(one.holder) not in (None, index)]
            if text := overwritten(change, others):
                return Violation("OW", f"{self._world.clients[index].name} {text}")
        checks = (("FT", refenced), ("FQ", overtaken), ("FQ", granted_to_unreachable), ("AD", not_admitted))
        for rule, check in checks:
            if rule in self._rules and (text := check(change)):
                return Violation(rule, text)
        return None

    def _client_of(self, holder: str) -> int | None:
        return self._world.index_of.get(holder[:1])

    def _granted(self, name: str, grant: StoredGrant, then: State) -> tuple[State, Violation | None]:
        epoch, grants = self._world.grants.values[then.grants]
        holder, fence = grant.holder, grant.fence
        # A re-asserted grant replaces the one that the server lost.
        grants = tuple(one for one in grants if (one.lock, one.holder, one.fence) != (name, holder, fence))
        then = self._record(then, epoch, grants, RecordedGrant(name, holder, fence, epoch))
        last = max((one.fence for one in grants if one.lock == name), default=-1)
        if "FT" in self._rules and fence <= last:
            return then, Violation("FT", f"{holder} is granted fence {fence}, after fence {last}")
        return then, None

    def _record(self, state: State, epoch: int, grants: tuple[RecordedGrant, ...], new: RecordedGrant) -> State:
        return state._replace(grants=self._world.grants.number((epoch, (*grants, new))))

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
            return self._left_on_a_server(state, clients) if self._is_at_rest(state, clients) else None
        return (
            self._denied_holder(state, clients)
            or self._wrong_marker(state)
            or self._deadlocked(state, clients)
            or (self._at_rest(state, clients) if self._is_at_rest(state, clients) else None)
        )

    def _wrong_belief(self, state: State, clients: Clients) -> Violation | None:
        epoch, grants = self._world.grants.values[state.grants]
        grant_of = {(one.lock, one.holder): one for one in grants}
        valid: dict[str, list[Belief]] = {}
        for _, client, process in clients:
            if client.status == CRASHED or not process.beliefs:
                continue
            for belief, end in process.beliefs:
                if end is not None and state.now >= end:
                    continue
                if self._world.model.servers > 1:
                    valid.setdefault(belief.lock, []).append(belief)
                    continue
                grant = grant_of.get((belief.lock, belief.holder))
                if grant is None or grant.epoch == epoch:
                    valid.setdefault(belief.lock, []).append(belief)
                fault = self._contradicted(state, belief, grant)
                if fault is not None:
                    return fault
        if "ME" in self._rules:
            for beliefs in valid.values():
                if len(beliefs) > 1 and (text := _incompatible(beliefs)):
                    return Violation("ME", text)
        return None

    def _contradicted(self, state: State, belief: Belief, grant: RecordedGrant | None) -> Violation | None:
        epoch, grants = self._world.grants.values[state.grants]
        holder, fence = belief.holder, belief.fence
        # A grant may reserve several fences: those above the previous grant's fence, up to its own.
        earlier = [one for one in grants if one.lock == belief.lock]
        floors = {one.holder: before.fence for before, one in itertools.pairwise(earlier)}
        if "FT" in self._rules and grant is not None and not floors.get(holder, 0) < fence <= grant.fence:
            return Violation("FT", f"{holder} was granted fence {grant.fence} and uses fence {fence}")
        if "SG" not in self._rules:
            return None
        if grant is None:
            return Violation("SG", f"{holder} believes that it holds the lock, and the store never granted it")
        view, now_us = self._view(state.servers[0], belief.lock), START_US + state.now
        stored = view.live(now_us).get(holder)
        if grant.epoch != epoch:
            return None
        if stored is None:
            owned = view.owned(now_us)
            return Violation("SG", f"{holder} believes that it holds the lock, and in the store it is {owned}")
        # A downgrade may be under way: the client counts as a reader from the moment it sends the request.
        mode = mode_of(belief.weight, belief.limit)
        if (stored.mode is not mode and mode is not Mode.READ) or stored.slots != belief.slots:
            return Violation("SG", f"{holder} has {mode.value} {belief.slots}, and in the store {stored.mode.value}")
        return None

    def _denied_holder(self, state: State, clients: Clients) -> Violation | None:
        if "NL" not in self._rules:
            return None
        for name in self._locks:
            for holder in self._view(state.servers[0], name).live(START_US + state.now):
                if any(holder in process.denied for _, _, process in clients):
                    return Violation("NL", f"{holder} got “not acquired”, and it is the holder")
        return None

    def _wrong_marker(self, state: State) -> Violation | None:
        if "MK" not in self._rules:
            return None
        for name in self._locks:
            longer = self._view(state.servers[0], name).marker_error_ms()
            if abs(longer) > MARKER_MS:
                verb = "outlives" if longer > 0 else "ends before"
                return Violation("MK", f"the marker of {name} {verb} the longest grant by {abs(longer):g} ms")
        return None

    def _deadlocked(self, state: State, clients: Clients) -> Violation | None:
        """Two clients that each wait for a lock on which the other has a lease."""
        if "DL" not in self._rules or len(self._locks) < 2:
            return None
        held = {
            index: {belief.lock for belief, end in process.beliefs if end is None or state.now < end}
            for index, client, process in clients
            if client.status == RUNNING and process.waiting
        }
        wanted = {index: {claim.name for claim in process.claims} for index, _, process in clients if index in held}
        for first, second in itertools.combinations(held, 2):
            if wanted[first] & held[second] and wanted[second] & held[first]:
                names = [self._world.clients[index].name for index in (first, second)]
                return Violation("DL", f"{' and '.join(names)} wait for each other")
        return None

    # States without messages in flight and without timers that are due.

    def _is_at_rest(self, state: State, clients: Clients) -> bool:
        for _, client, process in clients:
            if client.status == CRASHED:
                continue
            if client.status != RUNNING or client.requests or client.replies or client.notifications:
                return False
            if any(due <= state.now for _, due in process.timers):
                return False
        return not state.detached

    def _at_rest(self, state: State, clients: Clients) -> Violation | None:
        for name in self._locks:
            broken = self._asleep(state, name, clients) or self._stuck(state, name, clients)
            if broken is not None:
                return broken
        return self._left_on_a_server(state, clients) or self._left_behind(state, clients)

    def _asleep(self, state: State, name: str, clients: Clients) -> Violation | None:
        if "LW" not in self._rules:
            return None
        waiting = [one for one in clients if one[1].status == RUNNING and one[2].waiting]
        if not waiting:
            return None
        view, now_us = self._view(state.servers[0], name), START_US + state.now
        live = view.live(now_us)
        lost_message = not self._faults_spent(state) <= HARMLESS
        for one in waiting:  # its grant notification was lost
            beliefs = {belief.holder for belief, _ in one[2].beliefs}
            unaware = not beliefs.issuperset(one[2].holder_ids & live.keys())
            if unaware and (broken := self._sleeping(state, [one], lost_message)):
                return broken
        channels = self._subscribed(state.servers[0])
        reachable = [one.claim.holder for one in view.queue if one.reachable(channels, now_us)]
        dead = len(reachable) < len(view.queue)
        able = [one for one in waiting if self._is_admissible(one[2], name, live, reachable)]
        return self._sleeping(state, able, lost_message or dead) if able else None

    def _is_admissible(
        self, process: ProcessState, name: str, live: dict[str, StoredGrant], reachable: list[str]
    ) -> bool:
        """Whether a claim of this process could be granted now, and only dead waiters are ahead of it."""
        for claim in _claims(process, name):
            ahead = reachable[: reachable.index(claim.holder)] if claim.holder in reachable else reachable
            if not ahead and admissible(live.values(), claim) is not None:
                return True
        return False

    def _sleeping(self, state: State, waiting: Clients, is_late: bool) -> Violation | None:
        """At least one of these clients wakes in time."""
        wakes = min((due for _, _, process in waiting for _, due in process.timers), default=None)
        limit = POLL_US if is_late else SOON_US
        if wakes is not None and wakes <= state.now + limit:
            return None
        names = " and ".join(self._world.clients[index].name for index, _, _ in waiting)
        until = "for ever" if wakes is None else f"for another {(wakes - state.now) / 1e6:g} s"
        return Violation("LW", f"the lock is available, and {names} will sleep {until}")

    def _faults_spent(self, state: State) -> set[int]:
        return {at for at, (left, had) in enumerate(zip(state.faults, self._faults, strict=True)) if left != had}

    def _stuck(self, state: State, name: str, clients: Clients) -> Violation | None:
        if "ST" not in self._rules:
            return None
        view = self._view(state.servers[0], name)
        if view.endless:
            return Violation("ST", f"the key {view.endless[0].decode()} has no ttl")
        if view.lock is None or view.lock.expires_ms is not None:
            return None
        if any(client.status == RUNNING and (process.beliefs or process.working) for _, client, process in clients):
            return None
        owned = view.owned(START_US + state.now)
        return Violation("ST", f"the lock is {owned} for ever: it has no ttl, and no client will delete it")

    def _left_behind(self, state: State, clients: Clients) -> Violation | None:
        if "CF" in self._rules or "CL" not in self._rules or not self._faults_spent(state) <= {CANCEL}:
            return None
        for name in self._locks:
            view = self._view(state.servers[0], name)
            held, queued = set(view.live(START_US + state.now)), {one.claim.holder for one in view.queue}
            for index, _, process in clients:
                if not (process.done and process.idle):
                    continue
                client = self._world.clients[index].name
                if held & process.holder_ids:
                    owned = view.owned(START_US + state.now)
                    which = "the lock" if len(self._locks) == 1 else name
                    return Violation("CL", f"{client} has finished, and {which} is still {owned}")
                if queued & process.holder_ids:
                    return Violation("CL", f"{client} has finished, and still has a ticket in the queue")
        return None

    def _left_on_a_server(self, state: State, clients: Clients) -> Violation | None:
        if "CF" not in self._rules:
            return None
        for number, name in itertools.product(range(len(state.servers)), self._locks):
            held = set(self._view(state.servers[number], name).live(START_US + state.now))
            for index, client, process in clients:
                finished = client.status == RUNNING and process.done and process.idle
                if finished and held & process.holder_ids:
                    client_name = self._world.clients[index].name
                    return Violation("CF", f"{client_name} has finished, and server S{number} still has its lock")
        return None

    # Fences of a lock on several servers: no single server knows the order of the grants.

    def after_belief(self, before: State, then: State) -> tuple[State, Violation | None]:
        """`then` with the leases recorded that a client began to believe in by this transition."""
        if self._world.model.servers == 1 or "FT" not in self._rules or before.clients == then.clients:
            return then, None
        pairs = zip(self._world.each_client(before), self._world.each_client(then), strict=True)
        for (_, _, old), (_, _, new) in pairs:
            if old is not new and new.beliefs and not old.beliefs:
                belief = new.beliefs[0][0]
                holder, fence = belief.holder, belief.fence
                epoch, grants = self._world.grants.values[then.grants]
                then = self._record(then, epoch, grants, RecordedGrant(belief.lock, holder, fence, epoch))
                if grants and fence <= max(one.fence for one in grants):
                    last = grants[-1]
                    return then, Violation("FT", f"{holder} has fence {fence}, after {last.holder} had {last.fence}")
        return then, None


def _claims(process: ProcessState, name: str) -> Iterator[Claim]:
    """The claims on a lock that a process waits for. A hand-written lock is exclusive."""
    if not process.claims:
        yield Claim(name, "", 1.0, "")
    for claim in process.claims:
        if claim.name == name:
            yield claim


def _incompatible(beliefs: list[Belief]) -> str | None:
    """Why these leases of one lock must not be valid at the same time."""
    names = " and ".join(sorted(one.holder for one in beliefs))
    modes = {mode_of(one.weight, one.limit) for one in beliefs}
    if Mode.EXCLUSIVE in modes or len(modes) > 1:
        return f"{names} hold the lock at the same time"
    if modes == {Mode.READ}:
        return None
    last = max(beliefs, key=lambda one: one.fence)
    used = sum(one.weight for one in beliefs)
    if used > last.limit:
        return f"{names} hold {used} permits at the same time, and the limit is {last.limit}"
    slots = [slot for one in beliefs for slot in one.slots]
    return f"{names} have the slots {slots}" if len(slots) > len(set(slots)) else None
