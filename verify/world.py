"""The state of one small model: clients, servers and the network between them, as comparable values.

    State         time, the data of each server (and of its replica), one `ClientState` per client, requests that
                  outlived their connection, remaining faults, the grants so far
    ClientState   the process (as a list of inputs, stored as a tree), its messages in flight, and whether it runs, is
                  paused or has crashed
    Transition    one event: a server executes a request; a reply, notification or timer reaches a client; the client
                  finishes its work; time advances; or one of the faults that the model allows (`transitions.py`)

Rules:

- Messages overtake each other as on a real network: the requests of one client to one server stay in order, and so do
  the replies; notifications use a connection of their own.
- Time advances from one interesting instant to the next: a timer, an expiry in a store, the end of a lease. While a
  message is in flight or a timer is due, each advance consumes one `slow` fault.
- Each distinct list of inputs is fed to a client once, and each request to each server state once. The results are
  cached; the search itself only looks up numbers.
- A client that will never act again is not run any more, and messages to it are dropped. Only the requests that it has
  sent and the results that it has returned still count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.lua.scripts import (
    ACQUIRE,
    ACQUIRE_ALL,
    ADOPT,
    DOWNGRADE,
    INSPECT,
    RELEASE,
    RENEW,
    RENEW_SHARED,
)
from lockfast.stores.redis.protocol.resp import Reader, ReplyError
from verify.fingerprint import fingerprint
from verify.process import KEEPALIVE, LOCK, Belief, Process, Program
from verify.virtual_server import EMPTY, START_US, Snapshot, VirtualRedis, replicated

FAULTS = (
    "crash",
    "pause",
    "lose_request",
    "lose_reply",
    "lose_silently",
    "execute_late",
    "lose_notification",
    "cut_inbox",
    "restart",
    "cancel",
    "slow",
    "failover",
)
"""`lose_request` and `lose_reply` break the connection, so the client notices; `lose_silently` does not. A request
that is `execute_late` reaches the server after the client gave it up."""
(
    CRASH,
    PAUSE,
    LOSE_REQUEST,
    LOSE_REPLY,
    LOSE_SILENTLY,
    EXECUTE_LATE,
    LOSE_NOTIFICATION,
    CUT_INBOX,
    RESTART,
    CANCEL,
    SLOW,
    FAILOVER,
) = range(len(FAULTS))
NO_REPLICA = -1
LOADED = (ACQUIRE, RELEASE, RENEW, ADOPT, INSPECT, RENEW_SHARED, DOWNGRADE, ACQUIRE_ALL)
"""Scripts that the server knows at the start of a model."""

RUNNING, CRASHED = 0, -1
NO_REPLY = -1
"""In place of a reply: the connection was lost. As the number of a request: no client waits for its reply."""
INBOX_LOST = -1
"""In place of a notification: the subscription was lost."""
CACHED_PROCESSES = 4096
"""Processes kept at their current state, so that a new input does not replay all inputs before it."""


ALL_RULES = frozenset(
    ["ME", "SG", "FT", "AD", "OW", "NL", "LW", "FQ", "CL", "ST", "MK", "RL", "KP", "BD", "AL", "DL", "ER"]
)
"""The rules that the shipped lock must keep; `invariants.py` defines them."""


@dataclass(frozen=True)
class Client:
    """One client of a model. Its clock shows `offset + rate · true seconds`.

    `after` names a client that must signal before this one's work can end; a model passes a lease on that way.
    """

    name: str
    program: Program
    listening: bool = True
    rate: float = 1.0
    offset: float = 100.0
    mortal: bool = True
    cancellable: bool = True
    after: str | None = None

    def local(self, now: int) -> float:
        return self.offset + now * self.rate / 1e6

    def true(self, local: float) -> int:
        """The first microsecond at which the clock shows `local` or more."""
        now = int((local - self.offset) / self.rate * 1e6)
        while self.local(now) < local:
            now += 1
        return now


@dataclass(frozen=True)
class Model:
    """A small world to explore: its clients, the number of faults of each kind, and the last instant in seconds.

    `setup`: commands that the server has already executed. `tidy_crashes`: a client crashes only while it has no
    request in flight, which makes traces easier to read.
    """

    name: str
    clients: Sequence[Client]
    faults: dict[str, int] = field(default_factory=dict)
    seconds: float = 10.0
    servers: int = 1
    locks: tuple[str, ...] = (LOCK,)
    about: str = ""
    rules: frozenset[str] = ALL_RULES
    fence_key: bytes = b""
    tidy_crashes: bool = False
    setup: Sequence[tuple[str, ...]] = ()


class ProcessState:
    """A process after a list of inputs, and its state as seen from outside."""

    __slots__ = (
        "awaited",
        "beliefs",
        "children",
        "claims",
        "denied",
        "done",
        "holder_ids",
        "idle",
        "input",
        "lost",
        "mailboxes",
        "notes",
        "number",
        "over",
        "parent",
        "process",
        "sent",
        "signalled",
        "timers",
        "violation",
        "waiting",
        "working",
    )

    def __init__(self, number: int, parent: ProcessState | None, given: tuple[Any, ...]) -> None:
        self.number = number
        self.parent = parent
        self.input = given
        self.children: dict[tuple[Any, ...], ProcessState] = {}
        self.process: Process | None = None

    def observe(self, process: Process, client: Client, sent: int, notes: int) -> None:
        """Record the visible state; `sent` and `notes` count the entries that earlier states recorded."""
        waits = [(number, task.wait) for number, task in process.tasks.items() if task.wait is not None]
        self.sent = tuple(process.sent[sent:])
        self.notes = tuple(process.notes[notes:])
        self.timers = tuple((number, client.true(wait.until)) for number, wait in waits if wait.until is not None)
        self.awaited = frozenset(wait.key for _, wait in waits if wait.kind == "reply")
        self.beliefs: tuple[tuple[Belief, int | None], ...] = tuple(
            (belief, None if belief.until is None else client.true(belief.until)) for belief in process.beliefs()
        )
        self.working = any(wait.kind == "work" for _, wait in waits)
        self.waiting = any(wait.kind == "mailbox" for _, wait in waits)
        self.done = 1 not in process.tasks
        self.over = process.over
        self.idle = not any(task.name != KEEPALIVE for task in process.tasks.values())
        self.signalled = process.signalled
        self.lost = process.lost()
        self.mailboxes = frozenset(process.mailboxes)
        self.claims = tuple(process.claims[holder] for holder in process.mailboxes if holder in process.claims)
        self.holder_ids = frozenset(process.holder_ids)
        self.denied = frozenset(process.denied - process.releasing)
        self.violation = process.violations[0] if process.violations else None


class ClientState(NamedTuple):
    """A client and its messages in flight. `status` is RUNNING, CRASHED, or the time from which it may resume."""

    process: int
    status: int
    requests: tuple[tuple[int, int, int], ...]
    replies: tuple[tuple[int, int, int], ...]
    notifications: tuple[int, ...]


class State(NamedTuple):
    now: int
    servers: tuple[int, ...]
    clients: tuple[int, ...]
    detached: tuple[tuple[int, int, int], ...]
    faults: tuple[int, ...]
    grants: int
    replica: int = NO_REPLICA


class Effect(NamedTuple):
    """The effect of one request: the server's new state, the reply, and notifications as (client, notification)."""

    server: int
    reply: int
    notifications: tuple[tuple[int, int], ...]


class Interned:
    """Assigns each distinct value a number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any, key: Any = None) -> int:
        key = value if key is None else key
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(value)
        return number


class World:
    """The clients and servers of one model, with every result computed so far."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.clients = tuple(model.clients)
        self.index_of = {client.name: index for index, client in enumerate(self.clients)}
        self.processes: list[ProcessState] = []
        self.client_states = Interned()
        self.snapshots = Interned()
        self.requests = Interned()
        self.replies = Interned()
        self.notifications = Interned()
        self.grants = Interned()
        self._server = VirtualRedis()
        self._shared_keys = [keys_of(name).grants for name in model.locks]
        self._effects: dict[tuple[int, int, int, int], Effect] = {}
        self._expired: dict[tuple[int, int], tuple[int, int | None]] = {}
        self._cached: list[ProcessState] = []
        self._by_fingerprint: dict[Any, ProcessState] = {}

    def initial_state(self) -> State:
        server = self._server
        server.load(script.text for script in LOADED)
        for words in self.model.setup:
            server.call(*words)
        for client in self.clients:
            if client.listening:
                server.subscribe(client.name, f"inbox:{client.name}:1".encode())
        snapshot = self.snapshots.number(server.snapshot())
        states = []
        for client in self.clients:
            process = self._root(client)
            state = ClientState(process.number, RUNNING, self._interned_requests(process), (), ())
            states.append(self.client_states.number(state))
        faults = tuple(self.model.faults.get(name, 0) for name in FAULTS)
        replica = self.replicated(snapshot) if faults[FAILOVER] else NO_REPLICA
        grants = self.grants.number((0, ()))
        return State(0, (snapshot,) * self.model.servers, tuple(states), (), faults, grants, replica)

    # Clients.

    def _root(self, client: Client) -> ProcessState:
        state = ProcessState(len(self.processes), None, ("start", self.index_of[client.name]))
        self.processes.append(state)
        process = self._started(client)
        state.observe(process, client, 0, 0)
        self._cache(state, process)
        return state

    def _started(self, client: Client) -> Process:
        process = Process(client.name, client.program, listening=client.listening, started=client.local(0))
        process.start(client.local(0))
        return process

    def feed(self, index: int, state: ProcessState, kind: str, key: Any, now: int) -> ProcessState:
        """The process of a client after one more input."""
        given = (kind, key, now)
        child = state.children.get(given)
        if child is None:
            client = self.clients[index]
            process = state.process or self._replay(index, state)
            state.process = None
            sent, notes = len(process.sent), len(process.notes)
            self._apply(process, client, given)
            process.retire()
            child = ProcessState(len(self.processes), state, given)
            child.observe(process, client, sent, notes)
            child = state.children[given] = self._merged(index, child, process)
        return child

    def _merged(self, index: int, state: ProcessState, process: Process) -> ProcessState:
        """An equivalent state that is known already and has the same requests and notes, else this one."""
        key = (index, fingerprint(process), state.sent, state.notes)
        known = self._by_fingerprint.setdefault(key, state)
        if known is state:
            self.processes.append(state)
            self._cache(state, process)
        return known

    def _apply(self, process: Process, client: Client, given: tuple[Any, ...]) -> None:
        kind, key, now = given
        value: Any = None
        if kind == "reply":
            key, number = key
            value = self.replies.values[number]
        elif kind == "notification":
            key, value = self.notifications.values[key]
        process.feed(kind, key, value, client.local(now))

    def _replay(self, index: int, state: ProcessState) -> Process:
        inputs = []
        while state.parent is not None:
            inputs.append(state.input)
            state = state.parent
        process = self._started(self.clients[index])
        for given in reversed(inputs):
            self._apply(process, self.clients[index], given)
        return process

    def _cache(self, state: ProcessState, process: Process) -> None:
        state.process = process
        self._cached.append(state)
        if len(self._cached) > CACHED_PROCESSES:
            for old in self._cached[: CACHED_PROCESSES // 2]:
                old.process = None
            del self._cached[: CACHED_PROCESSES // 2]

    def _interned_requests(self, state: ProcessState) -> tuple[tuple[int, int, int], ...]:
        return tuple((number, server, self.requests.number(request)) for number, server, request in state.sent)

    def deliver(self, index: int, client: ClientState, kind: str, key: Any, now: int, **changes: Any) -> int:
        """The client's state after an input; the requests that it sends are in flight."""
        process = self.feed(index, self.processes[client.process], kind, key, now)
        if process.over:
            changes.update(replies=(), notifications=())  # no task is left to read them
        requests = client.requests + self._interned_requests(process)
        return self.client_states.number(client._replace(process=process.number, requests=requests, **changes))

    # Servers.

    def execute(self, server: int, request: int, index: int, now: int) -> Effect:
        """The effect of a client's request on a server state."""
        key = (server, request, index, now)
        effect = self._effects.get(key)
        if effect is None:
            machine = self._server
            machine.restore(self.snapshots.values[server], START_US + now)
            packed: bytes = self.requests.values[request]
            (words,) = Reader().feed(packed)
            if words[0] == b"SUBSCRIBE":
                machine.subscribe(self.clients[index].name, words[1])
                reply: Any = [b"subscribe", words[1], 1]
            else:
                reply = machine.execute(packed)
            notifications = tuple(
                (self.index_of[message.subscriber], self.notifications.number((message.channel, message.payload)))
                for message in machine.messages
            )
            snapshot = self.snapshots.number(machine.snapshot())
            effect = Effect(snapshot, self.replies.number(reply, _hashable(reply)), notifications)
            self._effects[key] = effect
        return effect

    def expire(self, server: int, now: int) -> tuple[int, int | None]:
        """The server's state at `now`, without expired keys, and the time of the next expiry."""
        found = self._expired.get((server, now))
        if found is None:
            machine = self._server
            machine.restore(self.snapshots.values[server], START_US + now)
            snapshot = self.snapshots.number(machine.snapshot())
            expiries = [expiry for expiry in (machine.next_expiry_us(), self._next_deadline()) if expiry is not None]
            found = self._expired[server, now] = snapshot, min(expiries) - START_US if expiries else None
        return found

    def _next_deadline(self) -> int | None:
        """The next end of a shared grant; its holder is not a key of its own, so the server does not expire it."""
        entries = (self._server.data.get(key) for key in self._shared_keys)
        ends = [int(end) for entry in entries if entry is not None for end, _ in entry.value]
        return min((end for end in ends if end > self._server.now_us), default=None)

    def without_subscriber(self, server: int, name: str) -> int:
        state: Snapshot = self.snapshots.values[server]
        left = frozenset(one for one in state.subscriptions if one[1] != name)
        return server if left == state.subscriptions else self.snapshots.number(state._replace(subscriptions=left))

    def replicated(self, server: int) -> int:
        """The state of an up-to-date replica of a server in this state."""
        return self.snapshots.number(replicated(self.snapshots.values[server]))

    def empty_server(self) -> int:
        return self.snapshots.number(EMPTY)

    def client_state(self, state: State, index: int) -> ClientState:
        client: ClientState = self.client_states.values[state.clients[index]]
        return client

    def each_client(self, state: State) -> Iterator[tuple[int, ClientState, ProcessState]]:
        for index, number in enumerate(state.clients):
            client: ClientState = self.client_states.values[number]
            yield index, client, self.processes[client.process]


def _hashable(reply: Any) -> Any:
    if isinstance(reply, ReplyError):
        return "error", str(reply)
    if isinstance(reply, list):
        return tuple(map(_hashable, reply))
    return type(reply).__name__, reply
