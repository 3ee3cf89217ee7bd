"""The lock as one plain key, on the user's own client: taken and given back in three ways, the rules once.

    script        EVALSHA, or EVAL where the server has forgotten the script
    transaction   WATCH, GET, MULTI ... EXEC; no script at all
    native        SET ... NX PX, and DELIFEQ (Valkey 9) or DELEX ... IFEQ (Redis 8.4); a script where there is neither

Rules kept here: taking and giving back are atomic, each by its id, and idempotent by it: an id that holds the lock
gets it again, with at least the time asked for. A race that was lost is a no. A cancelled call leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from math import ceil
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lockfast.errors import ConfigurationError, Outcome, StoreError, StoreUnavailable
from lockfast.ports import Runtime
from lockfast.stores.redis.lua.scripts import Script
from lockfast.stores.redis.protocol.error_replies import code_of, error_of
from lockfast.stores.redis.protocol.resp import ReplyError
from lockfast.stores.redis.user_client import Commands, Denied, commands_of
from lockfast.values import shown

How = Literal["script", "transaction", "native"]

TAKEN, OURS, NEW = 0, 1, 2
"""Answers to `take`: another has it; the id had it already; it was free."""

MOST_RACES = 100
FIRST_PAUSE = 0.002
MOST_PAUSE = 0.1
"""Seconds between two looks at a taken lock: doubling from the one to the other, with jitter."""
A_DAY = 86_400.0

TAKE = Script("simple_acquire")
GIVE = Script("simple_release")
LENGTHEN = Script("simple_renew")

DELETE_IF_EQUAL: tuple[tuple[str, ...], ...] = (("DELIFEQ",), ("DELEX", "IFEQ"))
"""The command in front of the key, and the word behind it, for each server that has one."""
_native: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Which of them a client's server has, by its place above; the count of them when it has none."""


class Plain:
    """One key on one client, and a way to lock it."""

    def __init__(self, client: Any, flavour: str, key: str | bytes, how: str) -> None:
        if how not in ("script", "transaction", "native"):
            raise ConfigurationError(f"how must be 'script', 'transaction' or 'native', not {shown(how)}.")
        self._client = client
        self._commands: Commands = commands_of(client, flavour)
        self._key = key
        self._how = how

    async def take(self, uid: str | bytes, ttl: float) -> int:
        """`NEW`, `OURS` or `TAKEN`."""
        ttl_ms = ceil(ttl * 1000)
        if self._how == "transaction":
            return (await self._race(lambda: self._try_to_take(uid, ttl_ms)))[0] or TAKEN
        if self._how == "native":
            if await self._call("SET", self._key, uid, "NX", "PX", ttl_ms):
                return NEW
            if await self._call("GET", self._key) != _bytes(uid):
                return TAKEN
        return int(await self.run(TAKE, uid, ttl_ms))

    async def take_once(self, uid: str | bytes, ttl: float | None) -> bool:
        """Take the lock only if it is free, even of this id. Without a ttl it does not end by itself."""
        limit: tuple[str | int, ...] = () if ttl is None else ("PX", ceil(ttl * 1000))
        return bool(await self._call("SET", self._key, uid, "NX", *limit))

    async def give(self, uid: str | bytes) -> bool:
        """Whether the lock was the id's, and is free now."""
        if self._how == "transaction":
            found, maybe_done = await self._race(lambda: self._try_to_give(uid))
            if found is None:
                raise StoreUnavailable(
                    f"The key {shown(self._key)} was changed by others {MOST_RACES} times while it was to be given "
                    "back, so it was not. Look who writes to it."
                )
            return found == OURS or maybe_done
        if self._how == "native":
            deleted = await self._delete_if_equal(uid)
            if deleted is not None:
                return deleted
        return bool(await self.run(GIVE, uid))

    async def lengthen(self, uid: str | bytes, milliseconds: int, *, add: bool, needs_ttl: bool) -> bool:
        """Whether the lock was the id's, and has more or less time now."""
        mode = ("add" if add else "set", "ttl" if needs_ttl else "")
        return bool(await self.run(LENGTHEN, uid, milliseconds, *mode))

    async def holder(self) -> bytes | None:
        """The id that has the lock."""
        held: bytes | None = await self._call("GET", self._key)
        return held

    async def run(self, script: Script, *args: str | bytes | int) -> Any:
        """Run a script on the key."""
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
        """Whether it was deleted; None when the server has no command for it. What it has is remembered."""
        for at in range(_native.get(self._client, 0), len(DELETE_IF_EQUAL)):
            command, *word = DELETE_IF_EQUAL[at]
            reply = await self._commands.call(command, self._key, *word, uid)
            if not _unknown(reply):
                _native[self._client] = at
                return bool(self._checked(reply))
        _native[self._client] = len(DELETE_IF_EQUAL)
        return None

    async def _race(self, attempt: Callable[[], Coroutine[Any, Any, int | None]]) -> tuple[int | None, bool]:
        """Try until nobody comes between (each lost race is another's progress), and once more after a lost
        connection; None after too many. And whether a transaction may have been done whose answer was lost."""
        maybe_done = failed = False
        for _ in range(MOST_RACES):
            try:
                done = await attempt()
            except Denied as denied:
                raise error_of(str(denied.reply), shown(self._key)) from denied
            except StoreUnavailable as error:
                if failed:
                    raise
                failed = True
                maybe_done = error.outcome is Outcome.UNKNOWN
                continue
            if done is not None:
                return done, maybe_done
        return None, maybe_done

    async def _try_to_take(self, uid: str | bytes, ttl_ms: int) -> int | None:
        """None when somebody came between."""
        async with self._commands.watching(self._key) as watched:
            held = self._checked(await watched.call("GET", self._key))
            if held is None:
                return NEW if await watched.execute(("SET", self._key, uid, "PX", ttl_ms)) else None
            if held != _bytes(uid):
                return TAKEN
            if self._checked(await watched.call("PTTL", self._key)) >= ttl_ms:
                return OURS
            return OURS if await watched.execute(("PEXPIRE", self._key, ttl_ms)) else None

    async def _try_to_give(self, uid: str | bytes) -> int | None:
        async with self._commands.watching(self._key) as watched:
            if self._checked(await watched.call("GET", self._key)) != _bytes(uid):
                return TAKEN
            return OURS if await watched.execute(("DEL", self._key)) else None


async def acquire(runtime: Runtime, plain: Plain, uid: str | bytes, ttl: float | None, *, once: bool = False) -> bool:
    """`take` (or `take_once`), to its end: if the caller is cancelled meanwhile, what was taken is given back."""
    found: dict[str, Any] = {}

    async def work() -> None:
        try:
            if once or ttl is None:
                found["answer"] = NEW if await plain.take_once(uid, ttl) else TAKEN
            else:
                found["answer"] = await plain.take(uid, ttl)
        except Exception as error:
            found["error"] = error
        if "left" in found:
            await undo()

    async def undo() -> None:
        if found.get("answer") == NEW:
            await give_quietly(plain, uid)

    try:
        await runtime.finish(work, "acquire", A_DAY)
    except BaseException:
        found["left"] = True
        await undo()
        raise
    if "error" in found:
        raise found["error"]
    return bool(found["answer"])


async def acquire_waiting(runtime: Runtime, plain: Plain, uid: str, ttl: float, patience: float) -> bool:
    """Look until it is ours or `patience` seconds have passed; then nothing is left behind."""
    give_up_at = runtime.now() + patience
    pause = FIRST_PAUSE
    try:
        while not await acquire(runtime, plain, uid, ttl):
            left = give_up_at - runtime.now()
            if left <= 0:
                return False
            await runtime.sleep(min(left, pause * (0.5 + 0.5 * runtime.random())))
            pause = min(MOST_PAUSE, 2 * pause)
    except StoreUnavailable:  # its last request may have been carried out, and nobody would know the id
        await give_quietly(plain, uid)
        raise
    return True


async def give_quietly(plain: Plain, uid: str | bytes) -> None:
    """Give back what may be there; where that fails, the ttl does it."""
    try:
        await plain.give(uid)
    except StoreError:
        return


def _unknown(reply: Any) -> bool:
    return isinstance(reply, ReplyError) and "unknown command" in str(reply)


def _bytes(uid: str | bytes) -> bytes:
    return uid if isinstance(uid, bytes) else uid.encode()
