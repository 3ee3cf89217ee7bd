"""Every move that is possible in a state of a `World`, and where it leads.

A move is `(kind, client, detail)`; `story.py` tells it in words. The moves of one client that touch nothing but its
own lane depend on the lane and the time alone, so they are worked out once for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from verify.world import (
    BROKEN,
    CANCEL,
    CRASH,
    CRASHED,
    CUT_INBOX,
    DEAF,
    FAILOVER,
    LATE,
    LOSE_PUSH,
    LOSE_REPLY,
    LOSE_REQUEST,
    NO_REPLICA,
    PAUSE,
    RESTART,
    RUNNING,
    SLOW,
    VANISH,
    Lane,
    State,
    World,
)

RESTART_US = 1_000
"""No server starts or takes over in less than a millisecond, so the clock has gone on when it grants again."""


class Move(NamedTuple):
    kind: str
    client: int = -1
    detail: Any = None


class Moves:
    def __init__(self, world: World) -> None:
        self._world = world
        self._own: dict[tuple[int, int, int], list[tuple[Move, int]]] = {}
        self._horizon = round(world.model.seconds * 1e6)

    def of(self, state: State) -> Iterator[tuple[Move, State]]:
        """All moves but those that execute a request, which `executions` gives."""
        pending = False
        for at, lane, node in self._world.each(state):
            if lane.status == RUNNING:
                own = self._own_moves(at, state.lanes[at], state.now)
                pending = pending or bool(own or lane.out)
                for move, after in own:
                    yield move, _with_lane(state, at, after)
                if node.working and self._may_go(state, at):
                    after = self._world.advanced(at, lane, "go", None, state.now)
                    yield Move("go", at), _with_lane(state, at, after)
            elif lane.status != CRASHED:
                pending = pending or bool(lane.out)
                if state.now >= lane.status:
                    yield Move("resume", at), self._put(state, at, lane._replace(status=RUNNING))
            else:
                yield from self._noticed(state, at)
            if lane.status != CRASHED and any(state.faults):
                yield from self._faults_of(state, at, lane)
        if state.faults[RESTART]:
            yield Move("restart"), self._begin_anew(_spend(state, RESTART), self._world.forgotten())
        if state.faults[FAILOVER]:
            yield from self._replica_moves(state)
        yield from self._tick(state, pending)

    def executions(self, state: State) -> Iterator[tuple[int, int, int, int, State]]:
        """Requests that a server may execute now, as (client, number, server, request), and the state without it."""
        for at, lane, _ in self._world.each(state):
            seen: set[int] = set()
            for entry in lane.out:
                number, server, request = entry
                if server not in seen:
                    seen.add(server)
                    rest = tuple(one for one in lane.out if one is not entry)
                    yield at, number, server, request, self._put(state, at, lane._replace(out=rest))
        for loose in dict.fromkeys(state.loose):
            others = list(state.loose)
            others.remove(loose)
            yield loose[0], BROKEN, loose[1], loose[2], state._replace(loose=tuple(others))

    def executed(self, state: State, at: int, number: int, server: int, request: int) -> State:
        """`state`, from which the request was taken, after a server has executed it."""
        world = self._world
        effect = world.execute(state.servers[server], request, at, state.now)
        servers = (*state.servers[:server], effect.server, *state.servers[server + 1 :])
        state = state._replace(servers=servers)
        lane = world.lane_of(state, at)
        if lane.status != CRASHED and number in world.nodes[lane.node].awaited:
            state = self._put(state, at, lane._replace(replies=(*lane.replies, (number, server, effect.reply))))
        for to, push in effect.pushes:
            lane = world.lane_of(state, to)
            if lane.status != CRASHED and not world.nodes[lane.node].over:
                state = self._put(state, to, lane._replace(pushes=(*lane.pushes, push)))
        return state

    def _may_go(self, state: State, at: int) -> bool:
        first = self._world.clients[at].after
        if first is None:
            return True
        lane = self._world.lane_of(state, self._world.index[first])
        return self._world.nodes[lane.node].signalled

    def _put(self, state: State, at: int, lane: Lane) -> State:
        return _with_lane(state, at, self._world.lanes.of(lane))

    # What one client may meet with.

    def _own_moves(self, at: int, number: int, now: int) -> list[tuple[Move, int]]:
        asked = (at, number, now)
        found = self._own.get(asked)
        if found is None:
            found = self._own[asked] = list(self._find_own(at, self._world.lanes.values[number], now))
        return found

    def _find_own(self, at: int, lane: Lane, now: int) -> Iterator[tuple[Move, int]]:
        world = self._world
        node = world.nodes[lane.node]
        seen: set[int] = set()
        for entry in lane.replies:
            number, server, reply = entry
            if server in seen:
                continue
            seen.add(server)
            rest = tuple(one for one in lane.replies if one is not entry)
            if number not in node.awaited:
                yield Move("ignored", at, reply), world.lanes.of(lane._replace(replies=rest))
            elif reply == BROKEN:
                yield Move("broken", at), world.advanced(at, lane, "broken", (number,), now, replies=rest)
            else:
                yield (
                    Move("reply", at, (reply, server)),
                    world.advanced(at, lane, "reply", (number, reply), now, replies=rest),
                )
        if lane.pushes:
            push, rest_pushes = lane.pushes[0], lane.pushes[1:]
            if push == DEAF:
                yield Move("deaf", at), world.advanced(at, lane, "deaf", None, now, pushes=rest_pushes)
            elif world.pushes.values[push][1].split(b" ")[0].decode() in node.boxes:
                yield Move("push", at, push), world.advanced(at, lane, "push", push, now, pushes=rest_pushes)
            else:
                yield Move("unread", at, push), world.lanes.of(lane._replace(pushes=rest_pushes))
        for task, due in node.timers:
            if due <= now:
                yield Move("timer", at, task), world.advanced(at, lane, "timer", task, now)

    # Faults.

    def _noticed(self, state: State, at: int) -> Iterator[tuple[Move, State]]:
        """Sooner or later a server finds out that a client is no more."""
        name = self._world.clients[at].name
        servers = tuple(self._world.without_subscriber(server, name) for server in state.servers)
        if servers != state.servers:
            yield Move("notice", at), state._replace(servers=servers)

    def _faults_of(self, state: State, at: int, lane: Lane) -> Iterator[tuple[Move, State]]:
        world, faults = self._world, state.faults
        client, node = world.clients[at], world.nodes[lane.node]
        ended = node.done and node.idle
        if faults[CRASH] and client.mortal and not ended and not (world.model.tidy_crashes and lane.out):
            loose = tuple(sorted(state.loose + tuple((at, server, request) for _, server, request in lane.out)))
            after = self._put(_spend(state, CRASH), at, Lane(lane.node, CRASHED, (), (), ()))
            yield Move("crash", at), after._replace(loose=loose)
        if lane.status != RUNNING:
            return
        if faults[PAUSE] and client.mortal and not ended:
            yield Move("pause", at), self._put(_spend(state, PAUSE), at, lane._replace(status=state.now + 1))
        if faults[CANCEL] and client.cancellable and not node.done and not node.working:
            after_cancel = world.advanced(at, lane, "cancel", None, state.now)
            yield Move("cancel", at), _with_lane(_spend(state, CANCEL), at, after_cancel)
        yield from self._network_faults(state, at, lane)

    def _network_faults(self, state: State, at: int, lane: Lane) -> Iterator[tuple[Move, State]]:
        world, faults = self._world, state.faults
        broken = tuple((number, server, BROKEN) for number, server, _ in lane.out)
        if lane.out:
            if faults[LOSE_REQUEST]:
                cut = lane._replace(out=(), replies=lane.replies + broken)
                yield Move("lose_request", at), self._put(_spend(state, LOSE_REQUEST), at, cut)
            if faults[VANISH]:
                yield (
                    Move("vanish", at, "request"),
                    self._put(_spend(state, VANISH), at, lane._replace(out=lane.out[1:])),
                )
            if faults[LATE]:
                loose = tuple(sorted(state.loose + tuple((at, server, request) for _, server, request in lane.out)))
                cut = lane._replace(out=(), replies=lane.replies + broken)
                yield Move("late", at), self._put(_spend(state, LATE), at, cut)._replace(loose=loose)
        if lane.replies and lane.replies[0][2] != BROKEN:
            if faults[LOSE_REPLY]:
                lost = tuple((number, server, BROKEN) for number, server, _ in lane.replies)
                cut = lane._replace(out=(), replies=lost + broken)
                yield Move("lose_reply", at), self._put(_spend(state, LOSE_REPLY), at, cut)
            if faults[VANISH]:
                cut = lane._replace(replies=lane.replies[1:])
                yield Move("vanish", at, "reply"), self._put(_spend(state, VANISH), at, cut)
        if lane.pushes and lane.pushes[0] != DEAF and faults[LOSE_PUSH]:
            yield Move("lose_push", at), self._put(_spend(state, LOSE_PUSH), at, lane._replace(pushes=lane.pushes[1:]))
        if faults[CUT_INBOX] and DEAF not in lane.pushes and world.nodes[lane.node].boxes:
            name = world.clients[at].name
            servers = tuple(world.without_subscriber(server, name) for server in state.servers)
            if servers != state.servers:
                after = self._put(_spend(state, CUT_INBOX), at, lane._replace(pushes=(*lane.pushes, DEAF)))
                yield Move("cut_inbox", at), after._replace(servers=servers)

    def _replica_moves(self, state: State) -> Iterator[tuple[Move, State]]:
        """The replica catches up, at whatever moment, or takes over with what it has."""
        current = self._world.copied(state.servers[0])
        if state.replica != current:
            yield Move("copy"), state._replace(replica=current)
        after = self._begin_anew(_spend(state, FAILOVER), self._world.at(state.replica, state.now + RESTART_US)[0])
        yield Move("failover"), after._replace(replica=NO_REPLICA)

    def _begin_anew(self, state: State, server: int) -> State:
        """All connections are broken, and the server that answers next is in this state."""
        world = self._world
        epoch, grants = world.grants.values[state.grants]
        after = state._replace(
            now=state.now + RESTART_US,
            servers=(server, *state.servers[1:]),
            loose=(),
            grants=world.grants.of((epoch + 1, grants)),
        )
        for at, lane, node in world.each(state):
            if lane.status != CRASHED:
                broken = tuple((number, server, BROKEN) for number, server, _ in lane.out)
                told = Lane(lane.node, lane.status, (), lane.replies + broken, (*lane.pushes, DEAF))
                after = self._put(after, at, Lane(lane.node, lane.status, (), (), ()) if node.over else told)
        return after

    # Time.

    def _tick(self, state: State, pending: bool) -> Iterator[tuple[Move, State]]:
        if pending:
            if not state.faults[SLOW]:
                return
            state = _spend(state, SLOW)
        then = self.next_instant(state)
        if then is not None and then <= self._horizon:
            servers = tuple(self._world.at(server, then)[0] for server in state.servers)
            yield Move("tick", -1, then), state._replace(now=then, servers=servers)

    def next_instant(self, state: State) -> int | None:
        """When something will happen by itself: a timer, an expiry, the end of a lease."""
        now = state.now
        instants = [when for server in state.servers if (when := self._world.at(server, now)[1]) is not None]
        busy = False
        for _, lane, node in self._world.each(state):
            if lane.status == CRASHED:
                continue
            busy = busy or not (node.done and node.idle)
            if lane.status == RUNNING:
                instants += [due for _, due in node.timers if due > now]
            instants += [end for _, end in node.beliefs if end is not None and end > now]
        return min(instants, default=None) if busy or any(state.loose) else None


def _with_lane(state: State, at: int, lane: int) -> State:
    return state._replace(lanes=(*state.lanes[:at], lane, *state.lanes[at + 1 :]))


def _spend(state: State, fault: int) -> State:
    faults = state.faults
    return state._replace(faults=(*faults[:fault], faults[fault] - 1, *faults[fault + 1 :]))
