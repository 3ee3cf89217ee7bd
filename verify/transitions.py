"""The transitions that are possible in a state of a `World`, and the states that they lead to.

`trace.py` describes them in words. Transitions that concern only one client depend on that client's state and the time
alone, so they are computed once for each pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from verify.world import (
    CANCEL,
    CRASH,
    CRASHED,
    CUT_INBOX,
    EXECUTE_LATE,
    FAILOVER,
    INBOX_LOST,
    LOSE_NOTIFICATION,
    LOSE_REPLY,
    LOSE_REQUEST,
    LOSE_SILENTLY,
    NO_REPLICA,
    NO_REPLY,
    PAUSE,
    RESTART,
    RUNNING,
    SLOW,
    ClientState,
    State,
    World,
)

RESTART_US = 1_000
"""A restart or failover takes at least a millisecond, so the server's clock has advanced before it grants again."""


class Transition(NamedTuple):
    kind: str
    client: int = -1
    detail: Any = None


class Transitions:
    def __init__(self, world: World) -> None:
        self._world = world
        self._own: dict[tuple[int, int, int], list[tuple[Transition, int]]] = {}
        self._horizon = round(world.model.seconds * 1e6)

    def of(self, state: State) -> Iterator[tuple[Transition, State]]:
        """All transitions except the execution of requests (`executions`)."""
        pending = False
        for index, client, process in self._world.each_client(state):
            if client.status == RUNNING:
                own = self._own_transitions(index, state.clients[index], state.now)
                pending = pending or bool(own or client.requests)
                for transition, after in own:
                    yield transition, _with_client(state, index, after)
                if process.working and self._may_finish(state, index):
                    after = self._world.deliver(index, client, "work_done", None, state.now)
                    yield Transition("work_done", index), _with_client(state, index, after)
            elif client.status != CRASHED:
                pending = pending or bool(client.requests)
                if state.now >= client.status:
                    yield Transition("resume", index), self._put(state, index, client._replace(status=RUNNING))
            else:
                yield from self._disconnection(state, index)
            if client.status != CRASHED and any(state.faults):
                yield from self._client_faults(state, index, client)
        if state.faults[RESTART]:
            yield Transition("restart"), self._replace_server(_spend(state, RESTART), self._world.empty_server())
        if state.faults[FAILOVER]:
            yield from self._replica_transitions(state)
        yield from self._tick(state, pending)

    def executions(self, state: State) -> Iterator[tuple[int, int, int, int, State]]:
        """Requests that a server may execute now, as (client, number, server, request), and the state without each."""
        for index, client, _ in self._world.each_client(state):
            seen: set[int] = set()
            for entry in client.requests:
                number, server, request = entry
                if server not in seen:
                    seen.add(server)
                    rest = tuple(one for one in client.requests if one is not entry)
                    yield index, number, server, request, self._put(state, index, client._replace(requests=rest))
        for detached in dict.fromkeys(state.detached):
            others = list(state.detached)
            others.remove(detached)
            yield detached[0], NO_REPLY, detached[1], detached[2], state._replace(detached=tuple(others))

    def executed(self, state: State, index: int, number: int, server: int, request: int) -> State:
        """The state after a server executed a request; `state` no longer contains it."""
        world = self._world
        effect = world.execute(state.servers[server], request, index, state.now)
        servers = (*state.servers[:server], effect.server, *state.servers[server + 1 :])
        state = state._replace(servers=servers)
        client = world.client_state(state, index)
        if client.status != CRASHED and number in world.processes[client.process].awaited:
            replies = (*client.replies, (number, server, effect.reply))
            state = self._put(state, index, client._replace(replies=replies))
        for to, notification in effect.notifications:
            client = world.client_state(state, to)
            if client.status != CRASHED and not world.processes[client.process].over:
                notifications = (*client.notifications, notification)
                state = self._put(state, to, client._replace(notifications=notifications))
        return state

    def _may_finish(self, state: State, index: int) -> bool:
        predecessor = self._world.clients[index].after
        if predecessor is None:
            return True
        client = self._world.client_state(state, self._world.index_of[predecessor])
        return self._world.processes[client.process].signalled

    def _put(self, state: State, index: int, client: ClientState) -> State:
        return _with_client(state, index, self._world.client_states.number(client))

    # Inputs of one client.

    def _own_transitions(self, index: int, number: int, now: int) -> list[tuple[Transition, int]]:
        key = (index, number, now)
        found = self._own.get(key)
        if found is None:
            client = self._world.client_states.values[number]
            found = self._own[key] = [*self._replies(index, client, now), *self._events(index, client, now)]
        return found

    def _replies(self, index: int, client: ClientState, now: int) -> Iterator[tuple[Transition, int]]:
        world = self._world
        seen: set[int] = set()
        for entry in client.replies:
            number, server, reply = entry
            if server in seen:
                continue
            seen.add(server)
            rest = tuple(one for one in client.replies if one is not entry)
            if number not in world.processes[client.process].awaited:
                after = world.client_states.number(client._replace(replies=rest))
                yield Transition("reply_ignored", index, reply), after
            elif reply == NO_REPLY:
                after = world.deliver(index, client, "connection_lost", (number,), now, replies=rest)
                yield Transition("connection_lost", index), after
            else:
                after = world.deliver(index, client, "reply", (number, reply), now, replies=rest)
                yield Transition("reply", index, (reply, server)), after

    def _events(self, index: int, client: ClientState, now: int) -> Iterator[tuple[Transition, int]]:
        world = self._world
        process = world.processes[client.process]
        if client.notifications:
            first, rest = client.notifications[0], client.notifications[1:]
            if first == INBOX_LOST:
                after = world.deliver(index, client, "inbox_lost", None, now, notifications=rest)
                yield Transition("inbox_lost", index), after
            elif world.notifications.values[first][1].split(b" ")[0].decode() in process.mailboxes:
                after = world.deliver(index, client, "notification", first, now, notifications=rest)
                yield Transition("notification", index, first), after
            else:
                after = world.client_states.number(client._replace(notifications=rest))
                yield Transition("notification_ignored", index, first), after
        for task, due in process.timers:
            if due <= now:
                yield Transition("timer", index, task), world.deliver(index, client, "timer", task, now)

    # Faults.

    def _disconnection(self, state: State, index: int) -> Iterator[tuple[Transition, State]]:
        """A server notices, at any time, that a client is gone."""
        name = self._world.clients[index].name
        servers = tuple(self._world.without_subscriber(server, name) for server in state.servers)
        if servers != state.servers:
            yield Transition("disconnect", index), state._replace(servers=servers)

    def _client_faults(self, state: State, index: int, client: ClientState) -> Iterator[tuple[Transition, State]]:
        world, faults = self._world, state.faults
        config, process = world.clients[index], world.processes[client.process]
        ended = process.done and process.idle
        if faults[CRASH] and config.mortal and not ended and not (world.model.tidy_crashes and client.requests):
            crashed = ClientState(client.process, CRASHED, (), (), ())
            after = self._put(_spend(state, CRASH), index, crashed)
            yield Transition("crash", index), after._replace(detached=_detach(state, index, client))
        if client.status != RUNNING:
            return
        if faults[PAUSE] and config.mortal and not ended:
            paused = client._replace(status=state.now + 1)
            yield Transition("pause", index), self._put(_spend(state, PAUSE), index, paused)
        if faults[CANCEL] and config.cancellable and not process.done and not process.working:
            cancelled = world.deliver(index, client, "cancel", None, state.now)
            yield Transition("cancel", index), _with_client(_spend(state, CANCEL), index, cancelled)
        yield from self._message_faults(state, index, client)
        yield from self._inbox_faults(state, index, client)

    def _message_faults(self, state: State, index: int, client: ClientState) -> Iterator[tuple[Transition, State]]:
        faults = state.faults
        unanswered = _no_replies(client.requests)
        if client.requests:
            cut = client._replace(requests=(), replies=client.replies + unanswered)
            if faults[LOSE_REQUEST]:
                yield Transition("lose_request", index), self._put(_spend(state, LOSE_REQUEST), index, cut)
            if faults[LOSE_SILENTLY]:
                lost = client._replace(requests=client.requests[1:])
                after = self._put(_spend(state, LOSE_SILENTLY), index, lost)
                yield Transition("lose_silently", index, "request"), after
            if faults[EXECUTE_LATE]:
                after = self._put(_spend(state, EXECUTE_LATE), index, cut)
                yield Transition("execute_late", index), after._replace(detached=_detach(state, index, client))
        if client.replies and client.replies[0][2] != NO_REPLY:
            if faults[LOSE_REPLY]:
                cut = client._replace(requests=(), replies=_no_replies(client.replies) + unanswered)
                yield Transition("lose_reply", index), self._put(_spend(state, LOSE_REPLY), index, cut)
            if faults[LOSE_SILENTLY]:
                lost = client._replace(replies=client.replies[1:])
                after = self._put(_spend(state, LOSE_SILENTLY), index, lost)
                yield Transition("lose_silently", index, "reply"), after

    def _inbox_faults(self, state: State, index: int, client: ClientState) -> Iterator[tuple[Transition, State]]:
        world, faults = self._world, state.faults
        notifications = client.notifications
        if notifications and notifications[0] != INBOX_LOST and faults[LOSE_NOTIFICATION]:
            lost = client._replace(notifications=notifications[1:])
            yield Transition("lose_notification", index), self._put(_spend(state, LOSE_NOTIFICATION), index, lost)
        if faults[CUT_INBOX] and INBOX_LOST not in notifications and world.processes[client.process].mailboxes:
            name = world.clients[index].name
            servers = tuple(world.without_subscriber(server, name) for server in state.servers)
            if servers != state.servers:
                cut = client._replace(notifications=(*notifications, INBOX_LOST))
                after = self._put(_spend(state, CUT_INBOX), index, cut)
                yield Transition("cut_inbox", index), after._replace(servers=servers)

    def _replica_transitions(self, state: State) -> Iterator[tuple[Transition, State]]:
        """The replica catches up, at any time, or takes over with the data that it has."""
        current = self._world.replicated(state.servers[0])
        if state.replica != current:
            yield Transition("replicate"), state._replace(replica=current)
        server, _ = self._world.expire(state.replica, state.now + RESTART_US)
        after = self._replace_server(_spend(state, FAILOVER), server)
        yield Transition("failover"), after._replace(replica=NO_REPLICA)

    def _replace_server(self, state: State, server: int) -> State:
        """Break all connections; the next request reaches a server in this state."""
        world = self._world
        epoch, grants = world.grants.values[state.grants]
        after = state._replace(
            now=state.now + RESTART_US,
            servers=(server, *state.servers[1:]),
            detached=(),
            grants=world.grants.number((epoch + 1, grants)),
        )
        for index, client, process in world.each_client(state):
            if client.status != CRASHED:
                replies = () if process.over else client.replies + _no_replies(client.requests)
                notifications = () if process.over else (*client.notifications, INBOX_LOST)
                after = self._put(after, index, ClientState(client.process, client.status, (), replies, notifications))
        return after

    # Time.

    def _tick(self, state: State, pending: bool) -> Iterator[tuple[Transition, State]]:
        if pending:
            if not state.faults[SLOW]:
                return
            state = _spend(state, SLOW)
        then = self._next_instant(state)
        if then is not None and then <= self._horizon:
            servers = tuple(self._world.expire(server, then)[0] for server in state.servers)
            yield Transition("tick", -1, then), state._replace(now=then, servers=servers)

    def _next_instant(self, state: State) -> int | None:
        """The next timer, expiry or end of a lease; None if nothing can happen any more."""
        now = state.now
        instants = [when for server in state.servers if (when := self._world.expire(server, now)[1]) is not None]
        busy = False
        for _, client, process in self._world.each_client(state):
            if client.status == CRASHED:
                continue
            busy = busy or not (process.done and process.idle)
            if client.status == RUNNING:
                instants += [due for _, due in process.timers if due > now]
            instants += [end for _, end in process.beliefs if end is not None and end > now]
        return min(instants, default=None) if busy or any(state.detached) else None


Messages = tuple[tuple[int, int, int], ...]


def _with_client(state: State, index: int, client: int) -> State:
    return state._replace(clients=(*state.clients[:index], client, *state.clients[index + 1 :]))


def _spend(state: State, fault: int) -> State:
    faults = state.faults
    return state._replace(faults=(*faults[:fault], faults[fault] - 1, *faults[fault + 1 :]))


def _no_replies(messages: Messages) -> Messages:
    return tuple((number, server, NO_REPLY) for number, server, _ in messages)


def _detach(state: State, index: int, client: ClientState) -> Messages:
    """The requests that outlive their connection, with those of this client."""
    return tuple(sorted(state.detached + tuple((index, server, request) for _, server, request in client.requests)))
