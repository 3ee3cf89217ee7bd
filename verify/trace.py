"""The trace of a violation, in words that a reader who has never seen the code can follow."""

from __future__ import annotations

from typing import Any, NamedTuple

from lockfast.stores.redis.lua.scripts import REASSERT
from lockfast.stores.redis.protocol.resp import Reader, ReplyError
from verify import lua
from verify.invariants import Violation
from verify.transitions import Transition
from verify.virtual_server import START_US
from verify.world import LOADED, ProcessState, State, World

SCRIPTS = (*LOADED, REASSERT)

CLIENT_EVENTS = {
    "pause": "is paused (SIGSTOP, a long garbage collection, a suspended laptop)",
    "resume": "resumes",
    "crash": "crashes",
    "disconnect": "is gone: the server closes its connections",
    "cancel": "is cancelled",
    "lose_request": "loses its connection; the request never reaches the server",
    "execute_late": "loses its connection; the server may still execute the request later",
    "lose_reply": "loses its connection, and the reply with it",
    "lose_notification": "does not receive the notification: it is lost",
    "cut_inbox": "loses its subscription",
    "connection_lost": "notices that the connection is lost: there will be no reply",
    "inbox_lost": "notices that the subscription is lost",
    "work_done": "finishes its work",
    "reply_ignored": "receives a reply that it no longer waits for",
    "notification_ignored": "receives a notification that it no longer waits for",
    "timer": "stops waiting: its timer fires",
}
SERVER_EVENTS = {
    "restart": "restarts without its data",
    "replicate": "replicates all its data",
    "failover": "fails, and its replica takes over with the data that it has",
}
INPUTS = frozenset({"reply", "notification", "timer", "work_done", "connection_lost", "inbox_lost", "cancel"})
"""Transitions after which a client acts."""


class Line(NamedTuple):
    """One step of a trace; `to` is the receiver of a message, if any."""

    seconds: float
    who: str
    to: str | None
    text: str


class Trace:
    def __init__(self, world: World, path: list[tuple[State, Transition, State]], violation: Violation) -> None:
        self._world = world
        self.violation = violation
        self.lines: list[Line] = []
        self._sent_at: dict[tuple[int, int], float] = {}
        if path:
            for index, _, process in world.each_client(path[0][0]):
                self._add_actions(0.0, index, process)
        for before, transition, after in path:
            self._add(before, transition, after)

    def __str__(self) -> str:
        """The trace as text."""
        lines = [f"{line.seconds:8.3f} s  {line.who:<8}{_arrow(line)}{line.text}" for line in self.lines]
        return "\n".join([*lines, f"  violates  {self.violation.rule}: {self.violation.text}"])

    def mermaid(self) -> str:
        """The trace as a sequence diagram."""
        names = [client.name for client in self._world.clients]
        servers = [self._server(number) for number in range(self._world.model.servers)]
        lines = ["sequenceDiagram", *(f"    participant {name}" for name in (*names, *servers))]
        for line in self.lines:
            if line.who == "time":
                lines.append(f"    Note over {names[0]},{servers[-1]}: {_escaped(f't = {line.seconds:g} s')}")
            elif line.to is None:
                lines.append(f"    Note over {line.who}: {_escaped(line.text)}")
            else:
                arrow = "-->>" if line.who in servers else "->>"
                lines.append(f"    {line.who}{arrow}{line.to}: {_escaped(line.text)}")
        lines.append(f"    Note over {names[0]},{servers[-1]}: {_escaped('Violation: ' + self.violation.text)}")
        return "\n".join(lines)

    def _add_actions(self, seconds: float, index: int, process: ProcessState) -> None:
        """Add the notes of a client; its requests appear when a server executes them."""
        for number, _, _ in process.sent:
            self._sent_at[index, number] = seconds
        for note in process.notes:
            self._line(seconds, self._world.clients[index].name, None, note)

    def _line(self, seconds: float, who: str, to: str | None, text: str) -> None:
        self.lines.append(Line(seconds, who, to, text))

    def _server(self, number: int) -> str:
        return "Server" if self._world.model.servers == 1 else f"S{number}"

    def _add(self, before: State, transition: Transition, after: State) -> None:
        seconds = after.now / 1e6
        world = self._world
        if transition.kind == "tick":
            self._line(seconds, "time", None, f"advances by {(after.now - before.now) / 1e6:g} s")
        elif transition.kind in SERVER_EVENTS:
            self._line(seconds, "Server", None, SERVER_EVENTS[transition.kind])
        elif transition.kind == "execute":
            self._add_execution(seconds, before, transition)
        else:
            self._add_client_event(seconds, world.clients[transition.client].name, transition)
        if transition.kind in INPUTS:
            client = world.client_state(after, transition.client)
            self._add_actions(seconds, transition.client, world.processes[client.process])

    def _add_execution(self, seconds: float, before: State, transition: Transition) -> None:
        world = self._world
        server, request, number = transition.detail
        name, machine = world.clients[transition.client].name, self._server(server)
        effect = world.execute(before.servers[server], request, transition.client, before.now)
        sent_at = self._sent_at.get((transition.client, number), seconds)
        sent = " (sent earlier)" if number < 0 else ""
        if sent_at < seconds:
            sent = f" (sent at {sent_at:g} s)"
        self._line(seconds, name, machine, described(world.requests.values[request]) + sent)
        for to, notification in effect.notifications:
            text = world.notifications.values[notification][1].decode()
            self._line(seconds, machine, None, f"publishes “{text}” (in flight to {world.clients[to].name})")
        self._line(seconds, machine, None, _in_flight(_shown(world.replies.values[effect.reply]), name))

    def _add_client_event(self, seconds: float, name: str, transition: Transition) -> None:
        world = self._world
        if transition.kind == "reply":
            reply, server = transition.detail
            machine, text = self._server(server), _shown(world.replies.values[reply])
            if self.lines and self.lines[-1] == (seconds, machine, None, _in_flight(text, name)):
                self.lines.pop()  # the reply arrives at once
            self._line(seconds, machine, name, text)
        elif transition.kind == "notification":
            text = world.notifications.values[transition.detail][1].decode()
            self._line(seconds, "Server", name, f"notification “{text}”")
        elif transition.kind == "lose_silently":
            self._line(seconds, name, None, f"does not notice that a {transition.detail} is lost")
        else:
            self._line(seconds, name, None, CLIENT_EVENTS[transition.kind])


def _in_flight(reply: str, to: str) -> str:
    return f"replies {reply} (in flight to {to})"


def _arrow(line: Line) -> str:
    return f"→ {line.to}: " if line.to is not None else ""


def described(request: bytes) -> str:
    """Describe a request: a script by its name and arguments, a command as it is typed."""
    (words,) = Reader().feed(request)
    if words[0] in (b"EVAL", b"EVALSHA"):
        text = words[1] if words[0] == b"EVAL" else lua.text_of(words[1].decode())
        script = next((one for one in SCRIPTS if one.text == text), None)
        if script is not None:
            return _shipped_script(script.name, words) + (" (EVAL)" if words[0] == b"EVAL" else "")
        keys = int(words[2])
        title = text.strip().split(b"\n")[0].lstrip(b"- ")  # the comment in the script's first line
        words = [b"script (" + title + b")", *words[3 + keys :]]
    return " ".join(word.decode("utf-8", "replace") for word in words)


def _shipped_script(name: str, words: list[bytes]) -> str:
    keys = int(words[2])
    args = [word.decode("utf-8", "replace") for word in words[3 + keys :]]
    lock = words[3].decode("utf-8", "replace")
    if name == "acquire":
        queue = f", attempt {args[4]}, else enqueue for {args[3]}" if args[3] else ", do not enqueue"
        limit = f" of {args[8]} permits" if args[8] != "0" else ""
        weight = " as a reader" if args[7] != "0" and not limit else f" ({args[7]}{limit})" if limit else ""
        return f"acquire {lock} for {args[0]}{weight}, ttl {int(args[1]) / 1000:g} s{queue}"
    if name == "renew":
        return "renew " + ", ".join(
            f"{words[3 + at].decode()} for {args[at]}, ttl {int(args[at + 1]) / 1000:g} s" for at in range(0, keys, 2)
        )
    if name == "adopt":
        return f"adopt {lock} for {args[0]} in place of {args[3]}"
    if name == "acquire_all":
        names = (word.decode("utf-8", "replace") for word in words[3 : 3 + keys : 7])
        return "acquire " + " and ".join(f"{one} for {holder}" for one, holder in zip(names, args[::5], strict=True))
    return f"{name} {lock} for {args[0]}"


def _shown(reply: Any, within: bool = False) -> str:
    if isinstance(reply, ReplyError):
        return f"error {str(reply)[:60]}"
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    if isinstance(reply, list):
        fences = all(isinstance(item, int) and item >= START_US for item in reply)  # of several locks
        return "[" + ", ".join(_shown(item, within=not fences) for item in reply) + "]"
    if isinstance(reply, int) and reply >= START_US:
        return f"{'ticket' if within else 'granted, fence'} {reply - START_US}"
    return "nil" if reply is None else str(reply)


def _escaped(text: str) -> str:
    return text.replace(";", ",").replace("#", "no.").replace("\n", " ")
