"""The functions of `lockfast.simple` for asyncio clients.

A cancelled call leaves nothing behind: its request runs to the end, and an acquired lock is released.
"""

from __future__ import annotations

from typing import Any, Literal

from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.simple import MIN_TTL, How, KeyLock
from lockfast.values import Seconds, holder_id, lock_name, seconds

__all__ = ["How", "acquire", "acquire_lock", "acquire_lock_with_timeout", "release", "release_lock"]

_runtime = AsyncioRuntime()


def _lock(client: Any, key: str, how: How) -> KeyLock:
    return KeyLock(_runtime, client, "asyncio", lock_name(key), how)


async def acquire(client: Any, key: str, timeout: Seconds, uid: str, *, how: How = "script") -> bool:
    """Acquire the lock for `uid`; False if another uid holds it. It expires after `timeout` seconds."""
    ttl = seconds(timeout, "timeout", least=MIN_TTL)
    return await _lock(client, key, how).acquire(holder_id(uid), ttl)


async def release(client: Any, key: str, uid: str, *, how: How = "script") -> bool:
    """Release the lock before it expires. False, and no change, if `uid` does not hold it (any more)."""
    return await _lock(client, key, how).release(holder_id(uid))


async def acquire_lock(
    client: Any, name: str, acquire_timeout: Seconds = 10, lock_timeout: Seconds = 30, *, how: How = "script"
) -> str | Literal[False]:
    """Wait up to `acquire_timeout` seconds. Returns the identifier to release with, or False."""
    uid = _runtime.new_holder_id()
    timeout, ttl = seconds(acquire_timeout, "acquire_timeout"), seconds(lock_timeout, "lock_timeout", least=MIN_TTL)
    return await _lock(client, name, how).acquire_within(timeout, uid, ttl) and uid


async def acquire_lock_with_timeout(
    client: Any, name: str, acquire_timeout: Seconds = 10, lock_timeout: Seconds = 10, *, how: How = "script"
) -> str | Literal[False]:
    """`acquire_lock` under the name that first had a `lock_timeout`."""
    return await acquire_lock(client, name, acquire_timeout, lock_timeout, how=how)


async def release_lock(client: Any, name: str, identifier: str, *, how: How = "script") -> bool:
    """Release a lock from `acquire_lock`; False if it has expired."""
    return await release(client, name, identifier, how=how)
