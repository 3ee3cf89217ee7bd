"""Plain lock functions: a lock is one key, set through a client that you already have.

`how` selects the implementation. All of them exclude one another, `lockfast.Lock` and redis-py's lock:

    script        EVALSHA, or EVAL if the server does not have the script (the default)
    transaction   WATCH, GET, MULTI ... EXEC, for accounts that may not run scripts
    native        SET ... NX PX; DELIFEQ (Valkey 9) or DELEX ... IFEQ (Redis 8.4), else a script

Rules:

- Acquire and release are atomic, and idempotent by uid. An acquire by the current holder extends the ttl if needed,
  and never shortens it.
- A lost race is a negative answer, not an error.
- A cancelled call leaves no lock behind.

There is no renewal, no fence and no queue: use `lockfast.Lock` for those. `lockfast.simple.aio` has the same functions
for asyncio clients.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from math import ceil
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lockfast.errors import ConfigurationError, Outcome, StoreError, StoreUnavailable, shown
from lockfast.ports import Runtime
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.redis.lua.scripts import Script
from lockfast.stores.redis.protocol.error_replies import UnknownCommand, code_of, error_of
from lockfast.stores.redis.protocol.resp import ReplyError
from lockfast.stores.redis.user_client import UserClient
from lockfast.values import Seconds, holder_id, lock_name, seconds

__all__ = ["How", "acquire", "acquire_lock", "acquire_lock_with_timeout", "release", "release_lock"]

How = Literal["script", "transaction", "native"]

TAKEN, HELD, ACQUIRED = 0, 1, 2
"""Answers to an acquire: another uid holds the lock; this uid held it already; it was free and now belongs to it."""

MIN_TTL = 0.001
MAX_RACES = 100
FIRST_PAUSE, MAX_PAUSE = 0.002, 0.1  # seconds between two polls of a taken lock: doubled each time, with jitter
UNBOUNDED = 86_400.0  # seconds, a day: the client's own timeouts end a call long before

ACQUIRE = Script("simple_acquire")
RELEASE = Script("simple_release")
EXTEND = Script("simple_renew")

DELETE_IF_EQUAL: tuple[tuple[str, ...], ...] = (("DELIFEQ",), ("DELEX", "IFEQ"))
"""For each kind of server: the command before the key, and the word after it."""
_native: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Per client, the index of its server's command in DELETE_IF_EQUAL; the length of that if the server has none."""

_runtime = ThreadRuntime()


class KeyLock:
    """One key on one client, locked in the chosen way; for both flavours."""

    def __init__(self, runtime: Runtime, client: Any, flavour: str, key: str | bytes, how: str = "script") -> None:
        if how not in ("script", "transaction", "native"):
            raise ConfigurationError(f"how must be 'script', 'transaction' or 'native', not {shown(how)}.")
        self._runtime = runtime
        self._client = client
        self._commands = UserClient(client, flavour)
        self._key = key
        self._how = how

    async def acquire(self, uid: str | bytes, ttl: float | None, *, only_if_free: bool = False) -> bool:
        """Acquire the lock for `ttl` seconds. With `only_if_free`, even its holder is refused.

        Without a ttl the lock never expires. If the caller is cancelled, a lock acquired by this call is released."""
        answer, cancelled = TAKEN, False
        errors: list[Exception] = []

        async def attempt() -> None:
            nonlocal answer
            try:
                if only_if_free or ttl is None:
                    limit: tuple[str | int, ...] = () if ttl is None else ("PX", ceil(ttl * 1000))
                    answer = ACQUIRED if await self._call("SET", self._key, uid, "NX", *limit) else TAKEN
                else:
                    answer = await self._acquire(uid, ceil(ttl * 1000))
            except Exception as error:
                errors.append(error)
            if cancelled:
                await undo()

        async def undo() -> None:
            if answer == ACQUIRED:
                await self._release_quietly(uid)

        try:
            await self._runtime.finish(attempt, "acquire", UNBOUNDED)
        except BaseException:
            cancelled = True
            await undo()
            raise
        if errors:
            raise errors[0]
        return answer != TAKEN

    async def acquire_within(self, timeout: float, uid: str, ttl: float) -> bool:
        """Poll until the lock is acquired or `timeout` seconds have passed."""
        give_up_at = self._runtime.now() + timeout
        pause = FIRST_PAUSE
        try:
            while not await self.acquire(uid, ttl):
                left = give_up_at - self._runtime.now()
                if left <= 0:
                    return False
                await self._runtime.sleep(min(left, pause * (0.5 + 0.5 * self._runtime.random())))
                pause = min(MAX_PAUSE, 2 * pause)
        except StoreUnavailable:  # the last request may have been executed, and the caller never learns the uid
            await self._release_quietly(uid)
            raise
        return True

    async def _acquire(self, uid: str | bytes, ttl_ms: int) -> int:
        if self._how == "transaction":
            return (await self._transact(lambda: self._try_acquire(uid, ttl_ms)))[0] or TAKEN
        if self._how == "native":
            if await self._call("SET", self._key, uid, "NX", "PX", ttl_ms):
                return ACQUIRED
            if await self.holder() != _bytes(uid):
                return TAKEN
        return int(await self._run(ACQUIRE, uid, ttl_ms))

    async def release(self, uid: str | bytes) -> bool:
        """Release the lock if `uid` holds it, and return whether it did."""
        if self._how == "transaction":
            found, may_have_executed = await self._transact(lambda: self._try_release(uid))
            if found is None:
                raise StoreUnavailable(
                    f"Other clients changed the key {shown(self._key)} during each of {MAX_RACES} attempts to release "
                    "it, so it was not released. Find out which program writes to it."
                )
            return found == HELD or may_have_executed
        if self._how == "native":
            deleted = await self._delete_if_equal(uid)
            if deleted is not None:
                return deleted
        return bool(await self._run(RELEASE, uid))

    async def extend(self, uid: str | bytes, milliseconds: int, *, add: bool, needs_ttl: bool) -> bool:
        """Set the ttl, or `add` to it, if `uid` holds the lock. May shorten it."""
        mode = ("add" if add else "set", "ttl" if needs_ttl else "")
        return bool(await self._run(EXTEND, uid, milliseconds, *mode))

    async def holder(self) -> bytes | None:
        """The uid that holds the lock."""
        holder: bytes | None = await self._call("GET", self._key)
        return holder

    async def _run(self, script: Script, *args: str | bytes | int) -> Any:
        reply = await self._commands.call("EVALSHA", script.digest, 1, self._key, *args)
        if isinstance(reply, ReplyError) and code_of(str(reply)) == "NOSCRIPT":
            reply = await self._commands.call("EVAL", script.text, 1, self._key, *args)
        return self._checked(reply)

    async def _call(self, *args: str | bytes | int) -> Any:
        return self._checked(await self._commands.call(*args))

    def _checked(self, reply: Any) -> Any:
        if isinstance(reply, ReplyError):
            raise error_of(str(reply), shown(self._key))
        return reply

    async def _delete_if_equal(self, uid: str | bytes) -> bool | None:
        """Whether the key was deleted; None if the server has no such command."""
        for index in range(_native.get(self._client, 0), len(DELETE_IF_EQUAL)):
            command, *word = DELETE_IF_EQUAL[index]
            try:
                deleted = bool(await self._call(command, self._key, *word, uid))
            except UnknownCommand:
                continue
            _native[self._client] = index
            return deleted
        _native[self._client] = len(DELETE_IF_EQUAL)
        return None

    async def _transact(self, attempt: Callable[[], Coroutine[Any, Any, int | None]]) -> tuple[int | None, bool]:
        """Repeat `attempt` until it loses no race, and once after a broken connection.

        Returns its answer (None after `MAX_RACES` lost races), and whether a transaction whose reply was lost may
        have been executed."""
        may_have_executed = failed = False
        for _ in range(MAX_RACES):
            try:
                answer = await attempt()
            except StoreUnavailable as error:
                if failed:
                    raise
                failed = True
                may_have_executed = error.outcome is Outcome.UNKNOWN
                continue
            if answer is not None:
                return answer, may_have_executed
        return None, may_have_executed

    async def _try_acquire(self, uid: str | bytes, ttl_ms: int) -> int | None:
        """One transaction; None if another client changed the key."""
        async with self._commands.watching(self._key) as watched:
            holder = await watched.call("GET")
            if holder is None:
                return ACQUIRED if await watched.execute("SET", uid, "PX", ttl_ms) else None
            if holder != _bytes(uid):
                return TAKEN
            if await watched.call("PTTL") >= ttl_ms:
                return HELD
            return HELD if await watched.execute("PEXPIRE", ttl_ms) else None

    async def _try_release(self, uid: str | bytes) -> int | None:
        """One transaction; None if another client changed the key."""
        async with self._commands.watching(self._key) as watched:
            if await watched.call("GET") != _bytes(uid):
                return TAKEN
            return HELD if await watched.execute("DEL") else None

    async def _release_quietly(self, uid: str | bytes) -> None:
        with suppress(StoreError):  # the key expires anyway
            await self.release(uid)


def _bytes(uid: str | bytes) -> bytes:
    return uid if isinstance(uid, bytes) else uid.encode()


def _lock(client: Any, key: str, how: How) -> KeyLock:
    return KeyLock(_runtime, client, "threads", lock_name(key), how)


def acquire(client: Any, key: str, timeout: Seconds, uid: str, *, how: How = "script") -> bool:
    """Acquire the lock for `uid`; False if another uid holds it. It expires after `timeout` seconds.

    A repeated call with the same `uid` returns True and extends the lock to `timeout` seconds from then, so you can
    repeat a call whose reply was lost.

        acquire(client, "lock", 10086, "moto")      # True
        acquire(client, "lock", 123, "nokia")       # False
    """
    ttl = seconds(timeout, "timeout", least=MIN_TTL)
    return run(_lock(client, key, how).acquire(holder_id(uid), ttl))


def release(client: Any, key: str, uid: str, *, how: How = "script") -> bool:
    """Release the lock before it expires. False, and no change, if `uid` does not hold it (any more).

    release(client, "lock", "nokia")            # False
    release(client, "lock", "moto")             # True
    """
    return run(_lock(client, key, how).release(holder_id(uid)))


def acquire_lock(
    client: Any, name: str, acquire_timeout: Seconds = 10, lock_timeout: Seconds = 30, *, how: How = "script"
) -> str | Literal[False]:
    """Wait up to `acquire_timeout` seconds. Returns the identifier to release with, or False.

    The lock expires after `lock_timeout` seconds.

    identifier = acquire_lock(client, "market", acquire_timeout=0.5, lock_timeout=2.5)
    """
    uid = _runtime.new_holder_id()
    timeout, ttl = seconds(acquire_timeout, "acquire_timeout"), seconds(lock_timeout, "lock_timeout", least=MIN_TTL)
    return run(_lock(client, name, how).acquire_within(timeout, uid, ttl)) and uid


def acquire_lock_with_timeout(
    client: Any, name: str, acquire_timeout: Seconds = 10, lock_timeout: Seconds = 10, *, how: How = "script"
) -> str | Literal[False]:
    """`acquire_lock` under the name that first had a `lock_timeout`."""
    return acquire_lock(client, name, acquire_timeout, lock_timeout, how=how)


def release_lock(client: Any, name: str, identifier: str, *, how: How = "script") -> bool:
    """Release a lock from `acquire_lock`; False if it has expired."""
    return release(client, name, identifier, how=how)
