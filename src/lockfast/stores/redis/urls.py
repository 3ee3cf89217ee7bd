"""From a redis://, rediss://, valkey://, valkeys:// or unix:// URL to a pool of redis-py, which is only read.

Rules kept here: redis-py passes over what it does not understand in a URL (a path that is no database, an option that
no connection has) until the first request; a lock in another database than the one meant excludes nobody, so such a URL
is refused at once. No message repeats a URL or a value from it, for there may be a password in it.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lockfast.errors import ConfigurationError
from lockfast.values import shown

TCP_SHAPE = "redis://user:password@host:6379/0"
UNIX_SHAPE = "unix:///path/to/socket?db=0"
_HALF_ESCAPED = re.compile("%(?![0-9a-fA-F]{2})")
_DATABASE = re.compile("/?|/[0-9]+")


def pool_of_url(url: str, flavour: str) -> Any:
    """A pool that would dial what `url` says; nothing is dialled here."""
    try:
        import redis
        import redis.asyncio
    except ImportError as error:
        raise ConfigurationError(
            "A Redis or Valkey URL needs redis-py, which is not installed. Run: pip install redis"
        ) from error
    pool_class = redis.ConnectionPool if flavour == "threads" else redis.asyncio.ConnectionPool
    plain = as_redis_py_writes_it(url)
    try:
        pool = pool_class.from_url(plain)
        settings = pool.connection_kwargs
        pool.connection_class(**settings)  # on trial: the options are checked when a connection is made
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        # Their message may quote the URL, and with it the password: so no cause is kept.
        raise _unreadable(plain, str(error)) from None
    return pool


def as_redis_py_writes_it(url: str) -> str:
    """`url` with a scheme that redis-py knows, if it is sound.

    >>> as_redis_py_writes_it("Valkeys://host/1")
    'rediss://host/1'
    """
    scheme, _, rest = url.partition("://")
    plain = f"{scheme.lower().replace('valkey', 'redis', 1)}://{rest}"
    try:
        parts = urlsplit(plain)
        sound = parts.port is None or parts.port > 0
    except ValueError:
        sound = False
    if not sound or parts.fragment or _HALF_ESCAPED.search(rest):
        raise _unreadable(plain)
    fits = len(parts.path) > 1 if parts.scheme == "unix" else _DATABASE.fullmatch(parts.path)
    if not fits:
        raise _unreadable(plain)
    return plain


def _unreadable(plain: str, why: str = "") -> ConfigurationError:
    options = parse_qs(urlsplit(plain).query) if why else {}
    unknown = next((name for name in options if f"keyword argument '{name}'" in why), None)
    problem = "can't be read" if unknown is None else f"has the option {shown(unknown)}, which no connection knows"
    return ConfigurationError(
        f"This Redis URL {problem}. It should look like {TCP_SHAPE}, or {UNIX_SHAPE}; special characters in a user "
        "name or password are written %40 and the like."
    )
