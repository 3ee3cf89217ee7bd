"""The user's own client as the plain functions see it, in both colours: one command, or one WATCH and what follows.

Rules kept here: an error reply is a reply (`ReplyError`, with its code in front again, which the client libraries cut
off); no answer is `StoreUnavailable` with an unknown outcome; replies are bytes whatever `decode_responses` says; a
connection that was used for WATCH goes back to the pool without one, on every path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from lockfast.errors import ConfigurationError, Outcome, StoreUnavailable
from lockfast.stores.redis.protocol.resp import ReplyError
from lockfast.values import clean, shown

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
"""The client libraries' errors that stand for a code, which their messages no longer have."""


class Denied(Exception):
    """An error reply in the midst of a transaction, on its way out of the block that has to UNWATCH."""

    def __init__(self, reply: ReplyError) -> None:
        super().__init__(str(reply))
        self.reply = reply


class Watched(Protocol):
    """A connection on which a key is watched."""

    async def call(self, *args: Argument) -> Any:
        """The reply to one command, at once."""

    async def execute(self, *commands: tuple[Argument, ...]) -> bool:
        """MULTI, the commands and EXEC; False when the key was changed by somebody else, and so nothing was done."""


class Commands(Protocol):
    """A client."""

    async def call(self, *args: Argument) -> Any:
        """The reply to one command."""

    def watching(self, key: str | bytes) -> AbstractAsyncContextManager[Watched]:
        """WATCH the key; UNWATCH it at the end of the block, whatever happened in it."""


def commands_of(client: Any, flavour: str) -> Commands:
    """What the client can do, if it is of that colour ("threads" or "asyncio")."""
    if hasattr(client, "command_stack") or not hasattr(client, "execute_command"):
        raise ConfigurationError(
            f"This needs a client of redis-py or valkey-py, not a pipeline; {shown(type(client).__name__)} is none."
        )
    given = "asyncio" if any(".asyncio" in kind.__module__ for kind in type(client).__mro__) else "threads"
    if given != flavour:
        use = "lockfast.simple.aio" if given == "asyncio" else "lockfast.simple"
        raise ConfigurationError(f"This client is made for {given}; use the functions of {use} with it.")
    return ThreadCommands(client) if flavour == "threads" else TaskCommands(client)


def reply_of(error: Exception) -> ReplyError:
    """The error reply that a client library raised; `StoreUnavailable` when there was no reply."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if not {"RedisError", "ValkeyError"} & set(kinds):
        raise error
    code = next((CODES[kind] for kind in kinds if kind in CODES), "")
    text = clean(str(error), 200)
    if code or "ResponseError" in kinds:
        return ReplyError(f"{code} {text}" if code and not text.startswith(code) else text)
    raise StoreUnavailable(
        f"The server did not answer; the request may or may not have been carried out. [{text}]",
        outcome=Outcome.UNKNOWN,
    ) from error


def lost_race(error: Exception, outcome: Outcome) -> bool:
    """Whether EXEC did nothing because the key was changed. A connection that died is called so too, and is not:
    then `outcome` is what is known of the transaction."""
    if not any(kind.__name__ == "WatchError" for kind in type(error).__mro__):
        return False
    if "Error occurred" in str(error):
        raise StoreUnavailable(
            f"The connection broke in the midst of a transaction; what it was to change: {outcome.value}.",
            outcome=outcome,
        ) from error
    return True


class ThreadCommands:
    """`Commands` of a blocking client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, *args: Argument) -> Any:
        try:
            return self._client.execute_command(*args, NEVER_DECODE=True)
        except Exception as error:
            return reply_of(error)

    @asynccontextmanager
    async def watching(self, key: str | bytes) -> AsyncIterator[Watched]:
        with self._client.pipeline(transaction=True) as pipe:
            try:
                pipe.watch(key)
            except Exception as error:
                raise Denied(reply_of(error)) from error
            yield _ThreadWatched(pipe)


class _ThreadWatched:
    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    async def call(self, *args: Argument) -> Any:
        try:
            return self._pipe.execute_command(*args, NEVER_DECODE=True)
        except Exception as error:
            lost_race(error, Outcome.NOT_DONE)
            return reply_of(error)

    async def execute(self, *commands: tuple[Argument, ...]) -> bool:
        self._pipe.multi()
        for command in commands:
            self._pipe.execute_command(*command)
        try:
            self._pipe.execute()
        except Exception as error:
            if lost_race(error, Outcome.UNKNOWN):
                return False
            raise Denied(reply_of(error)) from error
        return True


class TaskCommands:
    """`Commands` of an asyncio client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, *args: Argument) -> Any:
        try:
            return await self._client.execute_command(*args, NEVER_DECODE=True)
        except Exception as error:
            return reply_of(error)

    @asynccontextmanager
    async def watching(self, key: str | bytes) -> AsyncIterator[Watched]:
        async with self._client.pipeline(transaction=True) as pipe:
            try:
                await pipe.watch(key)
            except Exception as error:
                raise Denied(reply_of(error)) from error
            yield _TaskWatched(pipe)


class _TaskWatched:
    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    async def call(self, *args: Argument) -> Any:
        try:
            return await self._pipe.execute_command(*args, NEVER_DECODE=True)
        except Exception as error:
            lost_race(error, Outcome.NOT_DONE)
            return reply_of(error)

    async def execute(self, *commands: tuple[Argument, ...]) -> bool:
        self._pipe.multi()
        for command in commands:
            self._pipe.execute_command(*command)
        try:
            await self._pipe.execute()
        except Exception as error:
            if lost_race(error, Outcome.UNKNOWN):
                return False
            raise Denied(reply_of(error)) from error
        return True
