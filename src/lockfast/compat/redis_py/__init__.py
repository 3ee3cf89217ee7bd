"""redis-py's `Lock`, implemented by lockfast: the same signature, methods, attributes and exceptions.

    from lockfast.compat.redis_py import Lock

    lock = Lock(client, "report", timeout=10)                   # or, in existing code:
    lock = client.lock("report", timeout=10, lock_class=Lock)

This lock and redis-py's own exclude each other on one key, so a fleet can migrate one service at a time.
`docs/migrating.md` lists the differences. In new code, use `lockfast.Lock`.
"""

from lockfast.compat.redis_py import errors
from lockfast.compat.redis_py.errors import LockError, LockNotOwnedError
from lockfast.compat.redis_py.lock import AsyncLock, Lock

__all__ = ["AsyncLock", "Lock", "LockError", "LockNotOwnedError", "errors"]
