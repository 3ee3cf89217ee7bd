"""A Redis server without a process: the keys, the clock, the subscribers, and the shipped Lua.

Rules kept here:

- It runs nothing but what it is told to, and time passes only by `advance`: the same calls give the same answers.
- Its whole state is one hashable value (`snapshot`), so that a search can go back to it and merge equal ones.
- Values are immutable; a command replaces them. A key lives up to and including the millisecond it expires in, as on
  a real server, and is gone from the snapshot afterwards.
- Scripts are executed from their text, by Lua 5.1, with the conversions of a real server (`lua.py`). `TIME` and
  expiry stand still while one runs.

`tests/test_virtual.py` runs the same operations here and on real servers and compares the answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha1
from typing import Any, NamedTuple

from lockfast.stores.redis.protocol.resp import Reader, ReplyError
from verify import lua
from verify import server_commands as commands

START_US = 1_700_000_000_000_000


class Message(NamedTuple):
    """One PUBLISH as one subscriber gets it."""

    subscriber: str
    channel: bytes
    payload: bytes


class Snapshot(NamedTuple):
    """Everything that a server knows, but for the time; hashable."""

    keys: frozenset[tuple[bytes, commands.Entry]]
    scripts: frozenset[str]
    subscriptions: frozenset[tuple[bytes, str]]


EMPTY = Snapshot(frozenset(), frozenset(), frozenset())


class VirtualRedis:
    """One server. `messages` collects what was published; whoever plays the network takes it from there.

    >>> server = VirtualRedis()
    >>> server.call("SET", "door", "moto", "NX", "PX", "50"), server.call("SET", "door", "else", "NX")
    (b'OK', None)
    >>> server.advance(0.051)
    >>> server.call("GET", "door") is None
    True
    """

    def __init__(self, now_us: int = START_US) -> None:
        self.now_us = now_us
        self.data: dict[bytes, commands.Entry] = {}
        self.scripts: set[str] = set()
        self.subscriptions: set[tuple[bytes, str]] = set()
        self.messages: list[Message] = []

    @property
    def now_ms(self) -> int:
        return self.now_us // 1000

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1_000_000)

    def snapshot(self) -> Snapshot:
        """The state at this moment; keys whose time is over are not part of it."""
        self._purge()
        return Snapshot(frozenset(self.data.items()), frozenset(self.scripts), frozenset(self.subscriptions))

    def restore(self, state: Snapshot, now_us: int | None = None) -> None:
        """Be the server that `state` was taken from."""
        self.data = dict(state.keys)
        self.scripts = set(state.scripts)
        self.subscriptions = set(state.subscriptions)
        self.messages = []
        if now_us is not None:
            self.now_us = now_us

    def restart(self) -> None:
        """Forget keys, scripts and subscribers, as a server without persistence does."""
        self.restore(EMPTY)

    def next_expiry_us(self) -> int | None:
        """The first moment at which a key will be gone that is here now."""
        self._purge()
        ends = [entry.expires_ms for entry in self.data.values() if entry.expires_ms is not None]
        return (min(ends) + 1) * 1000 if ends else None

    def _purge(self) -> None:
        now = self.now_ms
        gone = [key for key, entry in self.data.items() if entry.expires_ms is not None and now > entry.expires_ms]
        for key in gone:
            del self.data[key]

    def subscribe(self, subscriber: str, channel: bytes) -> None:
        self.subscriptions.add((channel, subscriber))

    def unsubscribe(self, subscriber: str, channel: bytes | None = None) -> None:
        """End one subscription, or all of a subscriber whose connection has ended."""
        self.subscriptions = {
            one for one in self.subscriptions if one[1] != subscriber or channel not in (None, one[0])
        }

    def publish(self, channel: bytes, payload: bytes) -> int:
        found = sorted(one for one in self.subscriptions if one[0] == channel)
        self.messages += [Message(subscriber, channel, payload) for _, subscriber in found]
        return len(found)

    def execute(self, request: bytes) -> Any:
        """The reply to one packed request; an error reply as a `ReplyError` value."""
        (args,) = Reader().feed(request)
        return self.run([bytes(arg) for arg in args])

    def call(self, *args: str | bytes | float) -> Any:
        """The reply to one command, given as words."""
        return self.run([arg if isinstance(arg, bytes) else str(arg).encode() for arg in args])

    def run(self, args: list[bytes]) -> Any:
        """One command, or one script, with the clock standing still."""
        self._purge()
        try:
            reply = self._dispatch(args)
        except ReplyError as error:
            return error
        return reply.text if isinstance(reply, commands.Status) else reply

    def _dispatch(self, args: list[bytes]) -> Any:
        name = args[0].upper()
        if name == b"EVAL":
            return self._eval(args[1], args[2:])
        if name == b"EVALSHA":
            digest = args[1].decode("ascii", "replace").lower()
            if digest not in self.scripts:
                raise ReplyError("NOSCRIPT No matching script. Please use EVAL.")
            return self._run_script(digest, args[2:])
        if name == b"SCRIPT":
            return self._script(args[1:])
        return commands.run(self, args)

    def _eval(self, text: bytes, rest: list[bytes]) -> Any:
        digest = lua.remember(text)
        self.scripts.add(digest)
        return self._run_script(digest, rest)

    def _run_script(self, digest: str, rest: list[bytes]) -> Any:
        count = int(rest[0])
        if count > len(rest) - 1:
            raise ReplyError("ERR Number of keys can't be greater than number of args")
        return lua.run(digest, rest[1 : 1 + count], rest[1 + count :], lambda words: commands.run(self, words))

    def _script(self, args: list[bytes]) -> Any:
        what = args[0].upper()
        if what == b"LOAD":
            self.scripts.add(lua.remember(args[1]))
            return sha1(args[1], usedforsecurity=False).hexdigest().encode()
        if what == b"EXISTS":
            return [int(digest.decode() in self.scripts) for digest in args[1:]]
        if what == b"FLUSH":
            self.scripts.clear()
            return commands.OK
        raise ReplyError("ERR unknown subcommand of SCRIPT")

    def load(self, texts: Iterable[bytes]) -> None:
        """Have these scripts from the start, so that a small model need not explore their first loading."""
        for text in texts:
            self.scripts.add(lua.remember(text))


class Replica:
    """A copy of a server's keys that lags behind it: it knows what it had copied when it last caught up.

    >>> master = VirtualRedis()
    >>> replica = Replica(master)
    >>> master.call("SET", "door", "moto")
    b'OK'
    >>> replica.lags
    True
    >>> replica.take_over()  # before it has caught up: the lock is lost
    >>> master.call("GET", "door") is None
    True
    """

    def __init__(self, master: VirtualRedis) -> None:
        self._master = master
        self.catch_up()

    def catch_up(self) -> None:
        """Copy what the master has now."""
        self._known = copied(self._master.snapshot())

    @property
    def lags(self) -> bool:
        return self._known != copied(self._master.snapshot())

    def take_over(self) -> None:
        """The master is dead, and whoever spoke to it speaks to this copy: no subscriber followed, and no script."""
        self._master.restore(self._known)


def copied(state: Snapshot) -> Snapshot:
    """What a replica has of a server in this state: the keys alone."""
    return Snapshot(state.keys, frozenset(), frozenset())
