"""Two plain functions, and the few built on them: a lock as one key on a client that you have.

    acquire(client, key, timeout, uid)          take it for `timeout` seconds at most; True or False
    release(client, key, uid)                   give it back, if it is that uid's; True or False
    acquire_lock(client, name, ...)             wait for it up to a limit; an id, or False
    acquire_lock_with_timeout(client, name, ...)  the same by its older name
    release_lock(client, name, identifier)      give it back, if it is that id's

`how` chooses the way: "script" (the default), "transaction" (WATCH, MULTI, EXEC: for accounts that may not run scripts)
or "native" (SET NX, and the server's own delete-if-equal where it has one). All ways exclude one another, and so do
these functions, `lockfast.Lock` and redis-py's lock. There is no renewal, no fence and no queue here: `lockfast.Lock`
has them. For an asyncio client, the same names are in `lockfast.simple.aio`, awaited.
"""

from __future__ import annotations

from typing import Any, Literal

from lockfast.runtime.runner import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.simple import plain
from lockfast.simple.plain import How, Plain
from lockfast.values import Seconds, holder_id, lock_name, seconds

__all__ = ["How", "acquire", "acquire_lock", "acquire_lock_with_timeout", "release", "release_lock"]

LEAST = 0.001
_runtime = ThreadRuntime()


def _plain(client: Any, key: str, how: How) -> Plain:
    return Plain(client, "threads", lock_name(key), how)


def acquire(client: Any, key: str, timeout: Seconds, uid: str, *, how: How = "script") -> bool:
    """Take the lock for `uid`, for `timeout` seconds at most; then it frees itself. False when another has it.

    Asked again by the same `uid`, the answer is True again, and the lock lasts `timeout` seconds from then: so a call
    whose reply was lost may be repeated.

        acquire(client, "lock", 10086, "moto")      # True
        acquire(client, "lock", 123, "nokia")       # False
    """
    kept = seconds(timeout, "timeout", least=LEAST)
    return run(plain.acquire(_runtime, _plain(client, key, how), holder_id(uid), kept))


def release(client: Any, key: str, uid: str, *, how: How = "script") -> bool:
    """Give the lock back before its time; False when it is not (or no longer) held by `uid`, and then it stays.

    release(client, "lock", "nokia")            # False
    release(client, "lock", "moto")             # True
    """
    return run(_plain(client, key, how).give(holder_id(uid)))


def acquire_lock(
    client: Any, name: str, acquire_timeout: Seconds = 10, lock_timeout: Seconds = 30, *, how: How = "script"
) -> str | Literal[False]:
    """Wait up to `acquire_timeout` seconds; the id to give it back with, or False. Held for `lock_timeout` at most.

    identifier = acquire_lock(client, "market", acquire_timeout=0.5, lock_timeout=2.5)
    """
    uid = _runtime.new_holder_id()
    patience, kept = seconds(acquire_timeout, "acquire_timeout"), seconds(lock_timeout, "lock_timeout", least=LEAST)
    return run(plain.acquire_waiting(_runtime, _plain(client, name, how), uid, kept, patience)) and uid


def acquire_lock_with_timeout(
    client: Any, name: str, acquire_timeout: Seconds = 10, lock_timeout: Seconds = 10, *, how: How = "script"
) -> str | Literal[False]:
    """`acquire_lock`, by the name under which the limit of the hold was first added to it."""
    return acquire_lock(client, name, acquire_timeout, lock_timeout, how=how)


def release_lock(client: Any, name: str, identifier: str, *, how: How = "script") -> bool:
    """Give back what `acquire_lock` got; False when its time had run out, whoever has the lock now."""
    return release(client, name, identifier, how=how)
