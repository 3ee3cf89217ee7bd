"""A virtual Redis server: keys, clock and subscribers in memory, running the shipped Lua.

Rules:

- Deterministic: only calls change the state, and time passes only in `advance`.
- The whole state is one hashable value (`snapshot`), so a search can restore it and merge equal states.
- Values are immutable; a command replaces them. As on a real server, a key exists up to and including the millisecond
  of its expiry. Expired keys are not part of a snapshot.
- Scripts run from their text in Lua 5.1, with the type conversions of a real server (`lua.py`). `TIME` and expiry stand
  still during a script.

`tests/test_virtual.py` runs the same operations on real servers and compares the replies.
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
    """A published message for one subscriber."""

    subscriber: str
    channel: bytes
    payload: bytes


class Snapshot(NamedTuple):
    """The whole state of a server except its time; hashable."""

    keys: frozenset[tuple[bytes, commands.Entry]]
    scripts: frozenset[str]
    subscriptions: frozenset[tuple[bytes, str]]


EMPTY = Snapshot(frozenset(), frozenset(), frozenset())


class VirtualRedis:
    """One server. `messages` collects published messages until the network (explorer or simulator) delivers them.

    >>> server = VirtualRedis()
    >>> server.call("SET", "door", "A", "NX", "PX", "50"), server.call("SET", "door", "B", "NX")
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
        """The current state, without expired keys."""
        self.purge()
        return Snapshot(frozenset(self.data.items()), frozenset(self.scripts), frozenset(self.subscriptions))

    def restore(self, state: Snapshot, now_us: int | None = None) -> None:
        """Return to the state of a snapshot."""
        self.data = dict(state.keys)
        self.scripts = set(state.scripts)
        self.subscriptions = set(state.subscriptions)
        self.messages = []
        if now_us is not None:
            self.now_us = now_us

    def restart(self) -> None:
        """Drop keys, scripts and subscribers, like a server without persistence."""
        self.restore(EMPTY)

    def next_expiry_us(self) -> int | None:
        """The first instant at which one of the current keys will have expired."""
        self.purge()
        ends = [entry.expires_ms for entry in self.data.values() if entry.expires_ms is not None]
        return (min(ends) + 1) * 1000 if ends else None

    def purge(self) -> None:
        """Delete expired keys."""
        now = self.now_ms
        expired = [key for key, entry in self.data.items() if entry.expires_ms is not None and now > entry.expires_ms]
        for key in expired:
            del self.data[key]

    def subscribe(self, subscriber: str, channel: bytes) -> None:
        self.subscriptions.add((channel, subscriber))

    def unsubscribe(self, subscriber: str, channel: bytes | None = None) -> None:
        """Remove one subscription, or all subscriptions of a subscriber that disconnected."""
        self.subscriptions = {
            one for one in self.subscriptions if one[1] != subscriber or channel not in (None, one[0])
        }

    def publish(self, channel: bytes, payload: bytes) -> int:
        found = sorted(one for one in self.subscriptions if one[0] == channel)
        self.messages += [Message(subscriber, channel, payload) for _, subscriber in found]
        return len(found)

    def execute(self, request: bytes) -> Any:
        """Execute one packed request; an error reply is returned as a `ReplyError`."""
        (args,) = Reader().feed(request)
        return self.run([bytes(arg) for arg in args])

    def call(self, *args: str | bytes | float) -> Any:
        """Execute one command, given as words."""
        return self.run([arg if isinstance(arg, bytes) else str(arg).encode() for arg in args])

    def run(self, args: list[bytes]) -> Any:
        """Execute one command or script; the clock does not move meanwhile."""
        self.purge()
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
        digest = lua.register(text)
        self.scripts.add(digest)
        return self._run_script(digest, rest)

    def _run_script(self, digest: str, rest: list[bytes]) -> Any:
        count = int(rest[0])
        if count > len(rest) - 1:
            raise ReplyError("ERR Number of keys can't be greater than number of args")
        return lua.run(digest, rest[1 : 1 + count], rest[1 + count :], lambda words: commands.run(self, words))

    def _script(self, args: list[bytes]) -> Any:
        subcommand = args[0].upper()
        if subcommand == b"LOAD":
            self.scripts.add(lua.register(args[1]))
            return sha1(args[1], usedforsecurity=False).hexdigest().encode()
        if subcommand == b"EXISTS":
            return [int(digest.decode() in self.scripts) for digest in args[1:]]
        if subcommand == b"FLUSH":
            self.scripts.clear()
            return commands.OK
        raise ReplyError("ERR unknown subcommand of SCRIPT")

    def load(self, texts: Iterable[bytes]) -> None:
        """Load scripts in advance, so that a small model does not explore their first use."""
        for text in texts:
            self.scripts.add(lua.register(text))


class Replica:
    """An asynchronous replica: it has the keys that the master had at the last `catch_up`.

    >>> master = VirtualRedis()
    >>> replica = Replica(master)
    >>> master.call("SET", "door", "A")
    b'OK'
    >>> replica.lags
    True
    >>> replica.take_over()  # before it catches up: the lock is lost
    >>> master.call("GET", "door") is None
    True
    """

    def __init__(self, master: VirtualRedis) -> None:
        self._master = master
        self.catch_up()

    def catch_up(self) -> None:
        """Copy the current keys of the master."""
        self._keys_copied = replicated(self._master.snapshot())

    @property
    def lags(self) -> bool:
        return self._keys_copied != replicated(self._master.snapshot())

    def take_over(self) -> None:
        """Replace the master by this copy, which has no subscribers and no scripts."""
        self._master.restore(self._keys_copied)


def replicated(state: Snapshot) -> Snapshot:
    """The part of a server's state that an up-to-date replica has: the keys."""
    return Snapshot(state.keys, frozenset(), frozenset())
