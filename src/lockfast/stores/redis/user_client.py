"""Commands and WATCH transactions on the user's own redis-py or valkey-py client, sync or async.

Rules:

- An error reply is returned as a `ReplyError`, with the code that the client libraries cut off restored.
- No reply raises `StoreUnavailable`, outcome unknown.
- Replies are bytes, with or without `decode_responses`.
- A connection that carried a WATCH returns to the pool without one, on every path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from lockfast.errors import ConfigurationError, Outcome, StoreUnavailable, shown
from lockfast.stores.redis.protocol.error_replies import error_of
from lockfast.stores.redis.protocol.resp import ReplyError
from lockfast.values import clean

Argument = str | bytes | int

CODES = {
    "NoScriptError": "NOSCRIPT",
    "NoPermissionError": "NOPERM",
    "ReadOnlyError": "READONLY",
    "BusyLoadingError": "LOADING",
    "OutOfMemoryError": "OOM",
    "AuthenticationError": "WRONGPASS",
    "ExecAbortError": "EXECABORT",
    "TryAgainError": "TRYAGAIN",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
}
"""Error code of each exception class whose message lacks it."""


async def settled(result: Any) -> Any:
    """Return the result of a client library's call, sync or async. Never suspends on a sync client."""
    return await result if isawaitable(result) else result


def reply_of(error: Exception) -> ReplyError:
    """Convert a client library's exception to an error reply; raise `StoreUnavailable` if there was no reply."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if not {"RedisError", "ValkeyError"} & set(kinds):
        raise error
    code = next((CODES[kind] for kind in kinds if kind in CODES), "")
    text = clean(str(error), 200)
    if code or "ResponseError" in kinds:
        return ReplyError(f"{code} {text}" if code and not text.startswith(code) else text)
    problem = f"The server did not answer, so the outcome of the request is unknown. Repeat it. [{text}]"
    raise StoreUnavailable(problem, outcome=Outcome.UNKNOWN) from error


@dataclass(eq=False)
class WatchedKey:
    """A connection that watches one key. Error replies are raised."""

    _pipe: Any
    _key: str | bytes

    async def call(self, command: str) -> Any:
        try:
            return await settled(self._pipe.execute_command(command, self._key, NEVER_DECODE=True))
        except Exception as error:
            _lost_race(error, Outcome.NOT_DONE)
            raise error_of(str(reply_of(error)), shown(self._key)) from error

    async def execute(self, command: str, *args: Argument) -> bool:
        """Run one command in MULTI and EXEC. False: another client changed the key, and nothing was written."""
        self._pipe.multi()
        self._pipe.execute_command(command, self._key, *args)
        try:
            await settled(self._pipe.execute())
        except Exception as error:
            if _lost_race(error, Outcome.UNKNOWN):
                return False
            raise error_of(str(reply_of(error)), shown(self._key)) from error
        return True


def _lost_race(error: Exception, outcome: Outcome) -> bool:
    """Whether EXEC wrote nothing because the key changed.

    The libraries raise WatchError for a broken connection too; that becomes `StoreUnavailable` with `outcome`."""
    if not any(kind.__name__ == "WatchError" for kind in type(error).__mro__):
        return False
    if "Error occurred" in str(error):
        problem = f"The connection broke inside a transaction; its outcome: {outcome.value}. Repeat the call."
        raise StoreUnavailable(problem, outcome=outcome) from error
    return True


class UserClient:
    """The user's client, of the given flavour ("threads" or "asyncio")."""

    def __init__(self, client: Any, flavour: str) -> None:
        if hasattr(client, "command_stack") or not hasattr(client, "execute_command"):
            raise ConfigurationError(
                f"This function needs a client of redis-py or valkey-py, not a pipeline; got "
                f"{shown(type(client).__name__)}. Pass the client itself."
            )
        given = "asyncio" if any(".asyncio" in kind.__module__ for kind in type(client).__mro__) else "threads"
        if given != flavour:
            use = "lockfast.simple.aio" if given == "asyncio" else "lockfast.simple"
            raise ConfigurationError(f"This client is made for {given}; call the functions of {use} with it.")
        self._client = client

    async def call(self, *args: Argument) -> Any:
        try:
            return await settled(self._client.execute_command(*args, NEVER_DECODE=True))
        except Exception as error:
            return reply_of(error)

    @asynccontextmanager
    async def watching(self, key: str | bytes) -> AsyncIterator[WatchedKey]:
        """WATCH the key inside the block, and UNWATCH it at the end."""
        pipe = await settled(self._client.pipeline(transaction=True))
        try:
            try:
                await settled(pipe.watch(key))
            except Exception as error:
                raise error_of(str(reply_of(error)), shown(key)) from error
            yield WatchedKey(pipe, key)
        finally:
            await settled(pipe.reset())
