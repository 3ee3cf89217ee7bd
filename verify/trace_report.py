"""A violation's trace, told so that somebody who has never seen the code can follow it."""

from __future__ import annotations

from typing import Any, NamedTuple

from lockfast.stores.redis.lua.scripts import ACQUIRE, ADOPT, INSPECT, REASSERT, RELEASE, RENEW
from lockfast.stores.redis.protocol.resp import Reader, ReplyError
from verify import lua
from verify.invariants import Violation
from verify.moves import Move
from verify.virtual_server import START_US
from verify.world import Node, State, World

_ON_ITS_WAY = ", on its way to "

SCRIPTS = (ACQUIRE, RELEASE, RENEW, ADOPT, REASSERT, INSPECT)

TOLD = {
    "pause": "is stopped (SIGSTOP, a long garbage collection, a suspended laptop)",
    "resume": "runs again",
    "crash": "crashes, and does nothing more",
    "notice": "is gone, and the server notices: its connections are closed",
    "cancel": "is cancelled",
    "lose_request": "loses its connection, and its request never reaches the server",
    "late": "loses its connection; its request lingers on the way and may be executed later",
    "lose_reply": "loses its connection, and the reply with it",
    "lose_push": "never gets the push: it is lost on the way",
    "cut_inbox": "loses its subscription",
    "broken": "notices that its connection is broken: it gets no answer",
    "deaf": "notices that its subscription was cut",
    "go": "is done with its work",
    "ignored": "gets a reply that it no longer waits for",
    "unread": "gets a push that it no longer waits for",
}
SERVER_MOVES = {
    "restart": "restarts and has forgotten everything",
    "copy": "has copied everything to its replica",
    "failover": "dies, and its replica takes over with what it had copied",
}
ACTS = frozenset({"reply", "push", "timer", "go", "broken", "deaf", "cancel"})
"""Moves that give a client something to act upon."""


class Line(NamedTuple):
    """One step: when, who, to whom (None: nobody), and what."""

    seconds: float
    who: str
    to: str | None
    text: str


class Story:
    def __init__(self, world: World, path: list[tuple[State, Move, State]], violation: Violation) -> None:
        self._world = world
        self.violation = violation
        self.lines: list[Line] = []
        self._sent_at: dict[tuple[int, int], float] = {}
        if path:
            self._tell_start(path[0][0])
        for before, move, after in path:
            self._tell(before, move, after)

    def __str__(self) -> str:
        """The trace as text."""
        lines = [f"{line.seconds:8.3f} s  {line.who:<8}{_arrow(line)}{line.text}" for line in self.lines]
        return "\n".join([*lines, f"    broken  {self.violation.rule}: {self.violation.text}"])

    def mermaid(self) -> str:
        """The trace as a sequence diagram."""
        names = [client.name for client in self._world.clients]
        servers = ["Server"] if self._world.model.servers == 1 else [f"S{n}" for n in range(self._world.model.servers)]
        lines = ["sequenceDiagram", *(f"    participant {name}" for name in (*names, *servers))]
        for line in self.lines:
            if line.who == "time":
                lines.append(f"    Note over {names[0]},{servers[-1]}: {_safe(f't = {line.seconds:g} s')}")
            elif line.to is None:
                lines.append(f"    Note over {line.who}: {_safe(line.text)}")
            else:
                arrow = "-->>" if line.who in servers else "->>"
                lines.append(f"    {line.who}{arrow}{line.to}: {_safe(line.text)}")
        lines.append(f"    Note over {names[0]},{servers[-1]}: {_safe('Broken: ' + self.violation.text)}")
        return "\n".join(lines)

    def _tell_start(self, first: State) -> None:
        for at, _, node in self._world.each(first):
            self._tell_client(0.0, at, node)

    def _tell_client(self, seconds: float, at: int, node: Node) -> None:
        """What a client says about itself, and what it sends: that is told when a server executes it."""
        for number, _, _ in node.sent:
            self._sent_at[at, number] = seconds
        for note in node.notes:
            self._line(seconds, self._world.clients[at].name, None, note)

    def _line(self, seconds: float, who: str, to: str | None, text: str) -> None:
        self.lines.append(Line(seconds, who, to, text))

    def _server(self, number: int) -> str:
        return "Server" if self._world.model.servers == 1 else f"S{number}"

    def _tell(self, before: State, move: Move, after: State) -> None:
        seconds = after.now / 1e6
        world = self._world
        if move.kind == "tick":
            self._line(seconds, "time", None, f"goes on by {(after.now - before.now) / 1e6:g} s")
        elif move.kind in SERVER_MOVES:
            self._line(seconds, "Server", None, SERVER_MOVES[move.kind])
        elif move.kind == "execute":
            self._tell_execution(seconds, before, move)
        else:
            self._tell_move(seconds, world.clients[move.client].name, move)
        if move.kind in ACTS:
            self._tell_client(seconds, move.client, world.nodes[world.lane_of(after, move.client).node])

    def _tell_execution(self, seconds: float, before: State, move: Move) -> None:
        world = self._world
        server, request, number = move.detail
        name, machine = world.clients[move.client].name, self._server(server)
        effect = world.execute(before.servers[server], request, move.client, before.now)
        sent_at = self._sent_at.get((move.client, number), seconds)
        late = " (on its way since before)" if number < 0 else ""
        if sent_at < seconds:
            late = f" (sent at {sent_at:g} s)"
        self._line(seconds, name, machine, spoken(world.requests.values[request]) + late)
        for to, push in effect.pushes:
            text = f"pushes “{world.pushes.values[push][1].decode()}”, on its way to {world.clients[to].name}"
            self._line(seconds, machine, None, text)
        self._line(seconds, machine, None, f"answers {_shown(world.replies.values[effect.reply])}{_ON_ITS_WAY}{name}")

    def _tell_move(self, seconds: float, name: str, move: Move) -> None:
        world = self._world
        if move.kind == "reply":
            reply, server = move.detail
            machine, text = self._server(server), _shown(world.replies.values[reply])
            if self.lines and self.lines[-1] == (seconds, machine, None, f"answers {text}{_ON_ITS_WAY}{name}"):
                self.lines.pop()  # it arrives at once
            self._line(seconds, machine, name, text)
        elif move.kind == "push":
            self._line(seconds, "Server", name, f"push “{world.pushes.values[move.detail][1].decode()}”")
        elif move.kind == "timer":
            self._line(seconds, name, None, "has waited long enough: its timer fires")
        elif move.kind == "vanish":
            self._line(seconds, name, None, f"loses a {move.detail} on the way, and is not told")
        else:
            self._line(seconds, name, None, TOLD[move.kind])


def _arrow(line: Line) -> str:
    return f"→ {line.to}: " if line.to is not None else ""


def spoken(request: bytes) -> str:
    """A request in words: a script by its name and arguments, a command as it is typed."""
    (words,) = Reader().feed(request)
    if words[0] in (b"EVAL", b"EVALSHA"):
        text = words[1] if words[0] == b"EVAL" else lua.text_of(words[1].decode())
        script = next((one for one in SCRIPTS if one.text == text), None)
        if script is not None:
            return _script(script.name, words) + (" (sent in full)" if words[0] == b"EVAL" else "")
        keys = int(words[2])
        title = text.strip().split(b"\n")[0].lstrip(b"- ")  # a script that begins with a comment is told by it
        words = [b"script (" + title + b")", *words[3 + keys :]]
    return " ".join(word.decode("utf-8", "replace") for word in words)


def _script(name: str, words: list[bytes]) -> str:
    keys = int(words[2])
    args = [word.decode("utf-8", "replace") for word in words[3 + keys :]]
    lock = words[3].decode("utf-8", "replace")
    if name == "acquire":
        queue = f", turn {args[4]}, queue me at {args[3]}" if args[3] else ", do not queue me"
        return f"acquire {lock} for {args[0]}, ttl {int(args[1]) / 1000:g} s{queue}"
    if name == "renew":
        return "renew " + ", ".join(
            f"{words[3 + at].decode()} for {args[at]}, ttl {int(args[at + 1]) / 1000:g} s" for at in range(0, keys, 2)
        )
    if name == "adopt":
        return f"adopt {lock} for {args[0]} in place of {args[3]}"
    return f"{name} {lock} for {args[0]}"


def _shown(reply: Any, within: bool = False) -> str:
    if isinstance(reply, ReplyError):
        return f"error {str(reply)[:60]}"
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    if isinstance(reply, list):
        return "[" + ", ".join(_shown(item, within=True) for item in reply) + "]"
    if isinstance(reply, int) and reply >= START_US:
        return f"{'ticket' if within else 'granted, fence'} {reply - START_US}"
    return "nil" if reply is None else str(reply)


def _safe(text: str) -> str:
    return text.replace(";", ",").replace("#", "no.").replace("\n", " ")
