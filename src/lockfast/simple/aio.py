"""The plain functions of `lockfast.simple`, for an asyncio client: the same names, awaited.

A call that is cancelled leaves nothing behind: what was on its way is finished, and then given back.
"""

from __future__ import annotations

from typing import Any, Literal

from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.simple import LEAST, How, plain
from lockfast.simple.plain import Plain
from lockfast.values import Seconds, holder_id, lock_name, seconds

__all__ = ["How", "acquire", "acquire_lock", "acquire_lock_with_timeout", "release", "release_lock"]

_runtime = AsyncioRuntime()


def _plain(client: Any, key: str, how: How) -> Plain:
    return Plain(client, "asyncio", lock_name(key), how)


async def acquire(client: Any, key: str, timeout: Seconds, uid: str, *, how: How = "script") -> bool:
    """Take the lock for `uid`, for `timeout` seconds at most; False when another has it. See `lockfast.simple`."""
    kept = seconds(timeout, "timeout", least=LEAST)
    return await plain.acquire(_runtime, _plain(client, key, how), holder_id(uid), kept)


async def release(client: Any, key: str, uid: str, *, how: How = "script") -> bool:
    """Give the lock back before its time; False when it is not (or no longer) held by `uid`."""
    return await _plain(client, key, how).give(holder_id(uid))


async def acquire_lock(
    client: Any, name: str, acquire_timeout: Seconds = 10, lock_timeout: Seconds = 30, *, how: How = "script"
) -> str | Literal[False]:
    """Wait up to `acquire_timeout` seconds; the id to give it back with, or False. Held for `lock_timeout` at most."""
    uid = _runtime.new_holder_id()
    patience, kept = seconds(acquire_timeout, "acquire_timeout"), seconds(lock_timeout, "lock_timeout", least=LEAST)
    return await plain.acquire_waiting(_runtime, _plain(client, name, how), uid, kept, patience) and uid


async def acquire_lock_with_timeout(
    client: Any, name: str, acquire_timeout: Seconds = 10, lock_timeout: Seconds = 10, *, how: How = "script"
) -> str | Literal[False]:
    """`acquire_lock`, by the name under which the limit of the hold was first added to it."""
    return await acquire_lock(client, name, acquire_timeout, lock_timeout, how=how)


async def release_lock(client: Any, name: str, identifier: str, *, how: How = "script") -> bool:
    """Give back what `acquire_lock` got; False when its time had run out, whoever has the lock now."""
    return await release(client, name, identifier, how=how)
