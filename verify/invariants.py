"""What must hold in every state of a model, and for every request that a server executes.

    ME  at most one client at a time takes the lock for its own, by its own clock, while the store keeps its state
    SG  whoever takes the lock for its own is the one that the store has written down
    FT  each grant has a greater fence than all before it, and its holder knows that very fence
    OW  no request changes the lease of a holder that it does not name
    NL  "not acquired" is said only to somebody whom the store does not have as the holder, or who tried to leave
    LW  nobody sleeps on while the lock is free: 50 ms if no message was lost, else a look-again interval
    FQ  nobody who waits and can be reached is overtaken by a later ticket, and a ticket, once given, is kept
    CL  who has given up, was cancelled or gave back leaves neither a grant nor a place behind, if no message was lost
    CF  the same, whatever was lost
    ST  the lock never stays taken for ever
    AL  nobody is handed a lease that has run out already
    RL  who gives back in time what it holds is told so, even if a reply was lost
    KP  a lease that is renewed is not lost while nothing goes wrong
    BD  a wait with a limit ends within 100 ms of it while nothing goes wrong
    ER  no operation ends with an error that is not its to give

A rule that a model leaves out is not checked there: the broken locks of the gallery break one rule each.
"""

from __future__ import annotations

import itertools
import math
from hashlib import sha1
from typing import NamedTuple

from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.lua.scripts import ACQUIRE
from lockfast.stores.redis.protocol.resp import Reader
from verify.moves import Moves
from verify.server_commands import Entry
from verify.virtual_server import START_US
from verify.world import (
    CANCEL,
    CRASH,
    CRASHED,
    FAULTS,
    PAUSE,
    RUNNING,
    Lane,
    Node,
    State,
    World,
)

SOON_US = 50_000
LOOK_US = 1_010_000
HARMLESS = frozenset({CRASH, PAUSE, CANCEL})
"""Faults that lose no message and so excuse nobody for sleeping on."""


class Violation(NamedTuple):
    rule: str
    text: str


class Granting(NamedTuple):
    """One grant as the store made it."""

    holder: str
    fence: int
    epoch: int


class Rules:
    def __init__(self, world: World, moves: Moves) -> None:
        self._world = world
        self._moves = moves
        self._chosen = world.model.rules
        keys = keys_of(world.model.lock)
        self._lock, self._meta, self._queue, self._waiters = keys.lock, keys.meta, keys.queue, keys.waiters
        self._fence_key = world.model.fence_key or self._meta
        self._faults = tuple(world.model.faults.get(name, 0) for name in FAULTS)
        self._acquire = sha1(ACQUIRE.text, usedforsecurity=False).hexdigest().encode()
        self._denials: dict[tuple[int, int, int, int], bool] = {}
        self._keys: dict[int, dict[bytes, Entry]] = {}

    def _data(self, server: int) -> dict[bytes, Entry]:
        found = self._keys.get(server)
        if found is None:
            found = self._keys[server] = dict(self._world.snapshots.values[server].keys)
        return found

    # What a request may do.

    def after_request(self, state: State, at: int, request: int, then: State) -> tuple[State, Violation | None]:
        """`then` with the grant recorded that the request of client `at` made, if any; and what it broke."""
        if self._world.model.servers > 1:
            return then, None
        if "NL" in self._chosen and (denied := self._denied(state, at, request, then)):
            return then, denied
        if state.servers == then.servers:
            return then, None
        before, after = self._data(state.servers[0]), self._data(then.servers[0])
        old, new = before.get(self._lock), after.get(self._lock)
        if old == new:
            return then, None
        broken = self._overwritten(old, new, at, request)
        if new is not None and (old is None or old.value != new.value):
            then, fault = self._granted(new.value.decode(), before, after, then, request)
            broken = broken or fault
        return then, broken

    def _overwritten(self, old: Entry | None, new: Entry | None, at: int, request: int) -> Violation | None:
        if "OW" not in self._chosen or old is None or self._owner(old.value) in (None, at):
            return None
        if old.value in self._words(request):
            return None
        victim, culprit = old.value.decode(), self._world.clients[at].name
        what = "took away" if new is None else "overwrote" if new.value != old.value else "prolonged or shortened"
        return Violation("OW", f"{culprit} {what} the lease of {victim}, which its request does not even name")

    def _denied(self, state: State, at: int, request: int, then: State) -> Violation | None:
        """A request to acquire that is answered "taken" or "queued" although the lock is its sender's."""
        asked = (state.servers[0], request, at, state.now)
        if asked not in self._denials:
            words = self._words(request)
            lock = self._data(then.servers[0]).get(self._lock)
            reply = self._world.replies.values[self._world.execute(state.servers[0], request, at, state.now).reply]
            ours = lock is not None and words[1] == self._acquire and lock.value == words[7]
            self._denials[asked] = ours and isinstance(reply, list)
        if not self._denials[asked]:
            return None
        return Violation("NL", f"{self._words(request)[7].decode()} is told that the lock is taken, and it is its own")

    def _words(self, request: int) -> list[bytes]:
        (words,) = Reader().feed(self._world.requests.values[request])
        return list(words)

    def _owner(self, holder: bytes) -> int | None:
        return self._world.index.get(holder.decode("utf-8", "replace")[:1])

    def _granted(
        self, holder: str, before: dict[bytes, Entry], after: dict[bytes, Entry], then: State, request: int
    ) -> tuple[State, Violation | None]:
        world = self._world
        epoch, grants = world.grants.values[then.grants]
        noted = after.get(self._fence_key)
        fence = int(noted.value.split(b" ")[0]) if noted is not None else 0
        # A grant that a server had forgotten and takes back in counts as the same one, made anew.
        grants = tuple(one for one in grants if (one.holder, one.fence) != (holder, fence))
        then = then._replace(grants=world.grants.of((epoch, (*grants, Granting(holder, fence, epoch)))))
        if "FT" in self._chosen and grants and fence <= max(one.fence for one in grants):
            return then, Violation("FT", f"{holder} is granted fence {fence}, but {grants[-1].fence} was given before")
        if "FQ" in self._chosen:
            return then, self._out_of_turn(holder, before, then, request)
        return then, None

    def _out_of_turn(self, holder: str, before: dict[bytes, Entry], then: State, request: int) -> Violation | None:
        if first := self._overtaken(holder, before, then, self._shown_ticket(holder, request)):
            return Violation("FQ", f"{holder} gets the lock although {first} came earlier and can be reached")
        if holder.encode() in self._words(request) or self._waiters not in before:
            return None
        entry = dict(before[self._waiters].value).get(holder.encode())
        if entry is None or not self._reachable(entry, then):
            return Violation(
                "FQ", f"the lock is handed to {holder}, who can't be reached or has not asked for a whole ttl"
            )
        return None

    def _reachable(self, entry: bytes, then: State) -> bool:
        """Whether a waiter's inbox has a subscriber and its last request is younger than its ttl."""
        parts = entry.split(b" ")
        channels = {channel for channel, _ in self._world.snapshots.values[then.servers[0]].subscriptions}
        return parts[3] in channels and int(parts[2]) * 1000 > START_US + then.now

    def _shown_ticket(self, holder: str, request: int) -> float:
        """The ticket that the holder itself shows in this request, from an earlier place in the queue."""
        words = self._words(request)
        mine = len(words) > 12 and words[1] == self._acquire and words[7] == holder.encode()
        return float(words[12]) if mine and words[12] else math.inf

    def _overtaken(self, holder: str, before: dict[bytes, Entry], then: State, ticket: float) -> str | None:
        if self._queue not in before or self._waiters not in before:
            return None
        waiters = dict(before[self._waiters].value)
        for enqueue, member in before[self._queue].value:
            if member.decode() == holder or ticket <= enqueue:
                return None
            if self._reachable(waiters.get(member, b"0 0 0 - -"), then):
                return str(member.decode())
        return None

    # What a state may look like.

    def in_state(self, state: State) -> Violation | None:
        lanes = list(self._world.each(state))
        calm = state.faults == self._faults
        for at, _, node in lanes:
            if node.problem is not None and node.problem[0] in self._chosen and (calm or node.problem[0] != "BD"):
                return Violation(node.problem[0], f"{self._world.clients[at].name}: {node.problem[1]}")
            if node.lost and calm and "KP" in self._chosen:
                return Violation(
                    "KP", f"{self._world.clients[at].name} lost a lease that its keeper should have renewed"
                )
        broken = self._believed(state, lanes)
        if broken is not None:
            return broken
        if self._world.model.servers > 1:
            return self._asleep(state, None, lanes) if "CF" in self._chosen else None
        lock = self._data(state.servers[0]).get(self._lock)
        return self._refused(lock, lanes) or self._asleep(state, lock, lanes)

    def _believed(self, state: State, lanes: list[tuple[int, Lane, Node]]) -> Violation | None:
        epoch, grants = self._world.grants.values[state.grants]
        made = {one.holder: one for one in grants}
        floors = {one.holder: before.fence for before, one in itertools.pairwise(grants)}
        lease_state: list[str] = []
        for _, lane, node in lanes:
            if lane.status == CRASHED or not node.beliefs:
                continue
            for belief, end in node.beliefs:
                if end is not None and state.now >= end:
                    continue
                if self._world.model.servers > 1:
                    lease_state.append(belief.holder)
                    continue
                grant = made.get(belief.holder)
                if grant is None or grant.epoch == epoch:
                    lease_state.append(belief.holder)
                floor = floors.get(belief.holder, 0)
                fault = self._unsupported(state, belief.holder, belief.fence, floor, grant, epoch)
                if fault is not None:
                    return fault
        if len(lease_state) > 1 and "ME" in self._chosen:
            return Violation("ME", f"{' and '.join(sorted(lease_state))} hold the lock at the same time")
        return None

    def _unsupported(
        self, state: State, holder: str, fence: int, floor: int, grant: Granting | None, epoch: int
    ) -> Violation | None:
        # A grant may reserve several fences: all that are above the one before, up to its own.
        if "FT" in self._chosen and grant is not None and not floor < fence <= grant.fence:
            return Violation("FT", f"{holder} was granted fence {grant.fence} and takes {fence} for it")
        if "SG" not in self._chosen:
            return None
        if grant is None:
            return Violation("SG", f"{holder} takes the lock for its own, and the store never granted it")
        lock = self._data(state.servers[0]).get(self._lock)
        if grant.epoch == epoch and (lock is None or lock.value.decode() != holder):
            return Violation("SG", f"{holder} takes the lock for its own, but in the store it is {_whose(lock)}")
        return None

    def _refused(self, lock: Entry | None, lanes: list[tuple[int, Lane, Node]]) -> Violation | None:
        if lock is None or "NL" not in self._chosen:
            return None
        for _, _, node in lanes:
            if lock.value.decode() in node.refused:
                return Violation("NL", f"{lock.value.decode()} was told that it has not got the lock, and it has")
        return None

    def _asleep(self, state: State, lock: Entry | None, lanes: list[tuple[int, Lane, Node]]) -> Violation | None:
        """Rules for a state in which nothing is under way and nothing is due."""
        for _, lane, node in lanes:
            if lane.status == CRASHED:
                continue
            if lane.status != RUNNING or lane.out or lane.replies or lane.pushes:
                return None
            if any(due <= state.now for _, due in node.timers):
                return None
        if state.loose:
            return None
        return self._late(state, lock, lanes) or self._stuck(state, lock, lanes) or self._left(state, lock, lanes)

    def _late(self, state: State, lock: Entry | None, lanes: list[tuple[int, Lane, Node]]) -> Violation | None:
        if "LW" not in self._chosen:
            return None
        waiting = [(at, node) for at, lane, node in lanes if lane.status == RUNNING and node.waiting]
        if lock is not None:  # free for all that its new owner knows: the push was lost
            waiting = [(at, node) for at, node in waiting if lock.value.decode() in node.holders and not node.beliefs]
        if not waiting:
            return None
        looks = min((due for _, node in waiting for _, due in node.timers), default=None)
        unharmed = all(
            left == had
            for at, (left, had) in enumerate(zip(state.faults, self._faults, strict=True))
            if at not in HARMLESS
        )
        limit = SOON_US if unharmed else LOOK_US
        if looks is not None and looks <= state.now + limit:
            return None
        names = " and ".join(self._world.clients[at].name for at, _ in waiting)
        until = "for ever" if looks is None else f"for another {(looks - state.now) / 1e6:g} s"
        return Violation("LW", f"the lock is to be had and {names} will sleep on {until}")

    def _stuck(self, state: State, lock: Entry | None, lanes: list[tuple[int, Lane, Node]]) -> Violation | None:
        if "ST" not in self._chosen or lock is None or lock.expires_ms is not None:
            return None
        if any(lane.status == RUNNING and (node.beliefs or node.working) for _, lane, node in lanes):
            return None
        return Violation("ST", f"the lock is {_whose(lock)} for ever: it has no ttl, and nobody is left to remove it")

    def _left(self, state: State, lock: Entry | None, lanes: list[tuple[int, Lane, Node]]) -> Violation | None:
        if "CF" in self._chosen:
            return self._left_anywhere(state, lanes)
        if "CL" not in self._chosen:
            return None
        if any(
            left != had for at, (left, had) in enumerate(zip(state.faults, self._faults, strict=True)) if at != CANCEL
        ):
            return None
        entry = self._data(state.servers[0]).get(self._queue)
        queue = [] if entry is None else [member.decode() for _, member in entry.value]
        for at, _, node in lanes:
            if not (node.done and node.idle):
                continue
            name = self._world.clients[at].name
            if lock is not None and lock.value.decode() in node.holders:
                return Violation("CL", f"{name} is done, and the lock is still {_whose(lock)}")
            if any(holder in node.holders for holder in queue):
                return Violation("CL", f"{name} is done, and still has a place in the queue")
        return None

    def _left_anywhere(self, state: State, lanes: list[tuple[int, Lane, Node]]) -> Violation | None:
        for number, server in enumerate(state.servers):
            lock = self._data(server).get(self._lock)
            for at, lane, node in lanes:
                if (
                    lock is not None
                    and lane.status == RUNNING
                    and node.done
                    and node.idle
                    and lock.value.decode() in node.holders
                ):
                    return Violation(
                        "CF", f"{self._world.clients[at].name} is done, and server S{number} keeps its lock"
                    )
        return None

    # Fences of a lock on several servers, where no single server knows the order of the grants.

    def newly_believed(self, before: State, then: State) -> tuple[State, Violation | None]:
        """`then` with the leases recorded that somebody took for its own by this move."""
        if self._world.model.servers == 1 or "FT" not in self._chosen or before.lanes == then.lanes:
            return then, None
        for (_, _, old), (_, _, new) in zip(self._world.each(before), self._world.each(then), strict=True):
            if old is not new and new.beliefs and not old.beliefs:
                holder, fence, _ = new.beliefs[0][0]
                epoch, grants = self._world.grants.values[then.grants]
                then = then._replace(grants=self._world.grants.of((epoch, (*grants, Granting(holder, fence, epoch)))))
                if grants and fence <= max(one.fence for one in grants):
                    return then, Violation(
                        "FT", f"{holder} has fence {fence}, and {grants[-1].holder} had {grants[-1].fence} before"
                    )
        return then, None


def _whose(lock: Entry | None) -> str:
    return "free" if lock is None else f"{lock.value.decode()}'s"
