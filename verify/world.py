"""The world of one small model: clients, servers and the network between them, as values that can be compared.

    a state    the time, what each server knows (and its replica, in models with a failover), each client's lane,
               requests that were cut loose, the faults that are left, and a record of the grants so far
    a lane     the client (as the list of its inputs, kept in a tree), its requests under way, the replies and
               pushes under way to it, and whether it runs, is stopped, or has crashed
    a move     anything that can happen next: the server executes a request, a reply, push or timer reaches a client,
               the client's work ends, time goes on, or one of the faults that the model allows

Rules kept here:

- Whatever is under way may overtake whatever it can overtake on a real network: requests of one client to one server
  stay in order, and so do its replies; pushes travel on a connection of their own.
- Time goes from one interesting instant to the next: a timer, an expiry in a store, the end of a lease. While a message
  is under way or a timer is due, time goes on only at the price of one `slow`.
- Each distinct list of inputs is given to a client once, each request to each server state once; what they lead to is
  remembered. The search itself then only looks up numbers.
- A client that will never do anything again is no longer driven, and what is on its way to it is dropped: only what it
  has sent and what it was told count from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockfast.stores.redis.lua.scripts import ACQUIRE, ADOPT, INSPECT, RELEASE, RENEW
from lockfast.stores.redis.protocol.resp import Reader, ReplyError
from verify.fingerprint import fingerprint
from verify.process import Belief, Process, Program
from verify.virtual_server import EMPTY, START_US, Snapshot, VirtualRedis, copied

FAULTS = (
    "crash",
    "pause",
    "lose_request",
    "lose_reply",
    "vanish",
    "late",
    "lose_push",
    "cut_inbox",
    "restart",
    "cancel",
    "slow",
    "failover",
)
(CRASH, PAUSE, LOSE_REQUEST, LOSE_REPLY, VANISH, LATE, LOSE_PUSH, CUT_INBOX, RESTART, CANCEL, SLOW, FAILOVER) = range(
    len(FAULTS)
)
NO_REPLICA = -1

RUNNING, CRASHED = 0, -1
BROKEN = -1
DEAF = -1
KEPT_ALIVE = 4096
"""Processes that are kept where they stand, so that their next input need not be preceded by all before it."""


ALL_RULES = frozenset({"ME", "SG", "FT", "OW", "NL", "LW", "FQ", "CL", "ST", "RL", "KP", "BD", "AL", "ER"})
"""The rules that the shipped lock is held to; `rules.py` says what each means."""


@dataclass(frozen=True)
class Client:
    """One client of a model. Its clock shows `offset + rate · true seconds`.

    `after` names a client that has to give a signal before this one's work can end: how models pass something on.
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
    """A small world to be explored: who is in it, which faults may happen how often, and up to which moment.

    `setup` are commands that the server has executed before; `tidy_crashes` lets clients crash only while nothing of
    theirs is on its way, for stories that are easier to follow.
    """

    name: str
    clients: Sequence[Client]
    faults: dict[str, int] = field(default_factory=dict)
    seconds: float = 10.0
    servers: int = 1
    lock: str = "door"
    about: str = ""
    rules: frozenset[str] = ALL_RULES
    fence_key: bytes = b""
    tidy_crashes: bool = False
    setup: Sequence[tuple[str, ...]] = ()


class Node:
    """A client after a list of inputs, and what can be seen of it."""

    __slots__ = (
        "awaited",
        "beliefs",
        "boxes",
        "children",
        "done",
        "holders",
        "idle",
        "input",
        "lost",
        "notes",
        "number",
        "over",
        "parent",
        "problem",
        "process",
        "refused",
        "sent",
        "signalled",
        "timers",
        "waiting",
        "working",
    )

    def __init__(self, number: int, parent: Node | None, given: tuple[Any, ...]) -> None:
        self.number = number
        self.parent = parent
        self.input = given
        self.children: dict[tuple[Any, ...], Node] = {}
        self.process: Process | None = None

    def look(self, process: Process, client: Client, sent: int, notes: int) -> None:
        """Write down what the process shows now; `sent` and `notes` count what it had shown before."""
        waits = [(number, task.wait) for number, task in process.tasks.items() if task.wait is not None]
        self.sent = tuple(process.sent[sent:])
        self.notes = tuple(process.notes[notes:])
        self.timers = tuple((number, client.true(wait.until)) for number, wait in waits if wait.until is not None)
        self.awaited = frozenset(wait.key for _, wait in waits if wait.kind == "reply")
        self.beliefs: tuple[tuple[Belief, int | None], ...] = tuple(
            (belief, None if belief.until is None else client.true(belief.until)) for belief in process.beliefs()
        )
        self.working = any(wait.kind == "work" for _, wait in waits)
        self.waiting = any(wait.kind == "mail" for _, wait in waits)
        self.done = 1 not in process.tasks
        self.over = process.over
        self.idle = not any(task.name != "keeper" for task in process.tasks.values())
        self.signalled = process.signalled
        self.lost = process.lost()
        self.boxes = frozenset(process.boxes)
        self.holders = frozenset(process.holders)
        self.refused = frozenset(process.refused - process.releasing)
        self.problem = process.problems[0] if process.problems else None


class Lane(NamedTuple):
    """One client and its connections. `status` is RUNNING, CRASHED, or from when on it may run again."""

    node: int
    status: int
    out: tuple[tuple[int, int, int], ...]
    replies: tuple[tuple[int, int, int], ...]
    pushes: tuple[int, ...]


class State(NamedTuple):
    now: int
    servers: tuple[int, ...]
    lanes: tuple[int, ...]
    loose: tuple[tuple[int, int, int], ...]
    faults: tuple[int, ...]
    grants: int
    replica: int = NO_REPLICA


class Effect(NamedTuple):
    """What executing one request did: the new state of the server, the reply, and pushes as (lane, push)."""

    server: int
    reply: int
    pushes: tuple[tuple[int, int], ...]


class Numbers:
    """Values by number and numbers by value."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def of(self, value: Any, key: Any = None) -> int:
        key = value if key is None else key
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(value)
        return number


class World:
    """Everything that was learnt about the clients and servers of one model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.clients = tuple(model.clients)
        self.index = {client.name: at for at, client in enumerate(self.clients)}
        self.nodes: list[Node] = []
        self.snapshots = Numbers()
        self.requests = Numbers()
        self.replies = Numbers()
        self.pushes = Numbers()
        self.lanes = Numbers()
        self.grants = Numbers()
        self._server = VirtualRedis()
        self._effects: dict[tuple[int, int, int, int], Effect] = {}
        self._purged: dict[tuple[int, int], tuple[int, int | None]] = {}
        self._alive: list[Node] = []
        self._alike: dict[Any, Node] = {}

    def first(self) -> State:
        """The state in which everything begins."""
        server = self._server
        server.load(script.text for script in (ACQUIRE, RELEASE, RENEW, ADOPT, INSPECT))
        for words in self.model.setup:
            server.call(*words)
        for client in self.clients:
            if client.listening:
                server.subscribe(client.name, f"inbox:{client.name}:1".encode())
        known = self.snapshots.of(server.snapshot())
        lanes = []
        for at, client in enumerate(self.clients):
            node = self._root(client)
            lanes.append(self.lanes.of(Lane(node.number, RUNNING, self._numbered(at, node), (), ())))
        faults = tuple(self.model.faults.get(name, 0) for name in FAULTS)
        replica = self.copied(known) if faults[FAILOVER] else NO_REPLICA
        return State(0, (known,) * self.model.servers, tuple(lanes), (), faults, self.grants.of((0, ())), replica)

    # Clients.

    def _root(self, client: Client) -> Node:
        node = Node(len(self.nodes), None, ("start", self.index[client.name]))
        self.nodes.append(node)
        process = Process(client.name, client.program, listening=client.listening, started=client.local(0))
        process.start(client.local(0))
        node.look(process, client, 0, 0)
        self._keep(node, process)
        return node

    def step(self, at: int, node: Node, kind: str, key: Any, now: int) -> Node:
        """The client `at` after one more input."""
        given = (kind, key, now)
        child = node.children.get(given)
        if child is None:
            client = self.clients[at]
            process = node.process or self._replay(at, node)
            node.process = None
            sent, notes = len(process.sent), len(process.notes)
            self._feed(process, client, given)
            process.retire()
            child = Node(len(self.nodes), node, given)
            child.look(process, client, sent, notes)
            child = node.children[given] = self._merged(at, child, process)
        return child

    def _merged(self, at: int, node: Node, process: Process) -> Node:
        """The node that is like this one already, if there is one and it showed the same on the way."""
        alike = (at, fingerprint(process), node.sent, node.notes)
        known = self._alike.setdefault(alike, node)
        if known is node:
            self.nodes.append(node)
            self._keep(node, process)
        return known

    def _feed(self, process: Process, client: Client, given: tuple[Any, ...]) -> None:
        kind, key, now = given
        value: Any = None
        if kind == "reply":
            key, number = key
            value = self.replies.values[number]
        elif kind == "push":
            key, value = self.pushes.values[key]
        process.feed(kind, key, value, client.local(now))

    def _replay(self, at: int, node: Node) -> Process:
        client = self.clients[at]
        inputs = []
        while node.parent is not None:
            inputs.append(node.input)
            node = node.parent
        process = Process(client.name, client.program, listening=client.listening, started=client.local(0))
        process.start(client.local(0))
        for given in reversed(inputs):
            self._feed(process, client, given)
        return process

    def _keep(self, node: Node, process: Process) -> None:
        node.process = process
        self._alive.append(node)
        if len(self._alive) > KEPT_ALIVE:
            for old in self._alive[: KEPT_ALIVE // 2]:
                old.process = None
            del self._alive[: KEPT_ALIVE // 2]

    def _numbered(self, at: int, node: Node) -> tuple[tuple[int, int, int], ...]:
        return tuple((number, server, self.requests.of(request)) for number, server, request in node.sent)

    def advanced(self, at: int, lane: Lane, kind: str, key: Any, now: int, **changes: Any) -> int:
        """The lane after its client got an input; what the client sends is under way."""
        node = self.step(at, self.nodes[lane.node], kind, key, now)
        if node.over:
            changes.update(replies=(), pushes=())  # nobody is left to read them
        return self.lanes.of(lane._replace(node=node.number, out=lane.out + self._numbered(at, node), **changes))

    # Servers.

    def execute(self, server: int, request: int, at: int, now: int) -> Effect:
        """What the server in that state does with a request of client `at`."""
        asked = (server, request, at, now)
        effect = self._effects.get(asked)
        if effect is None:
            machine = self._server
            machine.restore(self.snapshots.values[server], START_US + now)
            packed: bytes = self.requests.values[request]
            (words,) = Reader().feed(packed)
            if words[0] == b"SUBSCRIBE":
                machine.subscribe(self.clients[at].name, words[1])
                reply: Any = [b"subscribe", words[1], 1]
            else:
                reply = machine.execute(packed)
            pushes = tuple(
                (self.index[message.subscriber], self.pushes.of((message.channel, message.payload)))
                for message in machine.messages
            )
            state = self.snapshots.of(machine.snapshot())
            effect = self._effects[asked] = Effect(state, self.replies.of(reply, _key(reply)), pushes)
        return effect

    def at(self, server: int, now: int) -> tuple[int, int | None]:
        """The server's state when time has come to `now`, and when a key will expire next."""
        found = self._purged.get((server, now))
        if found is None:
            machine = self._server
            machine.restore(self.snapshots.values[server], START_US + now)
            known = self.snapshots.of(machine.snapshot())
            expiry = machine.next_expiry_us()
            found = self._purged[server, now] = known, None if expiry is None else expiry - START_US
        return found

    def without_subscriber(self, server: int, name: str) -> int:
        state: Snapshot = self.snapshots.values[server]
        left = frozenset(one for one in state.subscriptions if one[1] != name)
        return server if left == state.subscriptions else self.snapshots.of(state._replace(subscriptions=left))

    def copied(self, server: int) -> int:
        """What a replica has that has caught up with a server in this state."""
        return self.snapshots.of(copied(self.snapshots.values[server]))

    def forgotten(self) -> int:
        return self.snapshots.of(EMPTY)

    def lane_of(self, state: State, at: int) -> Lane:
        lane: Lane = self.lanes.values[state.lanes[at]]
        return lane

    def each(self, state: State) -> Iterator[tuple[int, Lane, Node]]:
        for at, number in enumerate(state.lanes):
            lane: Lane = self.lanes.values[number]
            yield at, lane, self.nodes[lane.node]


def _key(reply: Any) -> Any:
    """A hashable stand-in for a reply."""
    if isinstance(reply, ReplyError):
        return "error", str(reply)
    if isinstance(reply, list):
        return tuple(map(_key, reply))
    return type(reply).__name__, reply
