"""Plain lock functions: a lock is one key, set through a client that you already have.

    acquire(client, key, timeout, uid)            acquire for at most `timeout` seconds; True or False
    release(client, key, uid)                     release, if `uid` holds the lock; True or False
    acquire_lock(client, name, ...)               wait up to a limit; an identifier, or False
    acquire_lock_with_timeout(client, name, ...)  the same under its older name
    release_lock(client, name, identifier)        release, if the identifier holds the lock

`how` selects the implementation: "script" (the default), "transaction" (WATCH, MULTI, EXEC, for accounts that may not
run scripts) or "native" (SET NX, and the server's delete-if-equal command where it has one). All of them exclude one
another, `lockfast.Lock` and redis-py's lock. These functions have no renewal, no fence and no queue: use
`lockfast.Lock` for those. `lockfast.simple.aio` has the same functions for asyncio clients.
"""

from __future__ import annotations

from typing import Any, Literal

from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.simple.key_lock import How, KeyLock
from lockfast.values import Seconds, holder_id, lock_name, seconds

__all__ = ["How", "acquire", "acquire_lock", "acquire_lock_with_timeout", "release", "release_lock"]

MIN_TTL = 0.001
_runtime = ThreadRuntime()


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
