"""Parse Redis URLs: one server, a master behind sentinels, or a cluster.

    redis://user:password@host:6379/0          also rediss://, valkey://, valkeys://
    unix:///path/to/socket?db=0
    redis+sentinel://host1,host2,host3/service/0
    redis+cluster://host1,host2

A URL with several hosts is split into its hosts and the URL of one server, which redis-py reads with its own checks.

Rules:

- redis-py ignores parts of a URL that it does not understand, or reports them at the first request. A lock in the
  wrong database excludes nobody, so such a URL is rejected here.
- No message repeats a URL or a part of it, because that could be a password.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urlsplit

from lockfast.errors import ConfigurationError, shown

ONE_SERVER = "redis://user:password@host:6379/0, or unix:///path/to/socket?db=0"
SENTINELS = "redis+sentinel://user:password@host1:26379,host2,host3/service/0"
CLUSTER = "redis+cluster://user:password@host1:6379,host2,host3"
SENTINEL_PORT = 26379
PORT = 6379
_INCOMPLETE_ESCAPE = re.compile("%(?![0-9a-fA-F]{2})")
_DATABASE = re.compile("/?|/[0-9]+")

Address = tuple[str, int]


def pool_of_url(url: str, flavour: str) -> Any:
    """A redis-py connection pool for `url`. Nothing is connected; lockfast only reads its settings."""
    try:
        import redis
        import redis.asyncio
    except ImportError as error:
        raise ConfigurationError("A Redis or Valkey URL needs redis-py. Run: pip install redis") from error
    pool_class = redis.ConnectionPool if flavour == "threads" else redis.asyncio.ConnectionPool
    plain = _as_redis_url(url)
    try:
        pool = pool_class.from_url(plain)
        pool.connection_class(**pool.connection_kwargs)  # redis-py checks the options only here
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        # The cause is dropped, because its message may quote the URL with the password.
        options = parse_qs(urlsplit(plain).query)
        unknown = next((name for name in options if f"keyword argument '{name}'" in str(error)), None)
        raise _unreadable(ONE_SERVER, unknown) from None
    return pool


def _as_redis_url(url: str) -> str:
    """Check `url` and convert its scheme for redis-py.

    >>> _as_redis_url("Valkeys://host/1")
    'rediss://host/1'
    """
    scheme, _, rest = url.partition("://")
    plain = f"{scheme.lower().replace('valkey', 'redis', 1)}://{rest}"
    try:
        parts = urlsplit(plain)
        valid = parts.port is None or parts.port > 0
    except ValueError:
        valid = False
    if not valid or parts.fragment or _INCOMPLETE_ESCAPE.search(rest):
        raise _unreadable(ONE_SERVER)
    if not (len(parts.path) > 1 if parts.scheme == "unix" else _DATABASE.fullmatch(parts.path)):
        raise _unreadable(ONE_SERVER)
    return plain


def _unreadable(form: str, unknown_option: str | None = None) -> ConfigurationError:
    problem = "can't be read"
    if unknown_option is not None:
        problem = f"has the option {shown(unknown_option)}, which no connection knows"
    return ConfigurationError(
        f"The Redis URL {problem}. Write it like {form}; escape special characters in a user name or password, "
        "for example %40 for @."
    )


class ServerGroup(NamedTuple):
    """The hosts in a URL, the URL of one server with the same options, and the data about sentinels."""

    hosts: tuple[Address, ...]
    one_server: str
    service: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = None


def parse_sentinel_url(url: str) -> ServerGroup:
    """
    >>> group = parse_sentinel_url("redis+sentinel://me:pw@a,b:5000/mymaster/2?sentinel_password=x&protocol=3")
    >>> group.hosts, group.service, group.one_server
    ((('a', 26379), ('b', 5000)), 'mymaster', 'redis://me:pw@a:26379/2?protocol=3')
    """
    scheme, user, hosts, path, query = _split(url, SENTINELS, SENTINEL_PORT)
    service, _, database = path.partition("/")
    if not service or "/" in database:
        raise _unreadable(SENTINELS)
    options = dict(parse_qsl(query, keep_blank_values=True))
    username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
    one_server = _join(scheme, user, hosts[0], database, urlencode(options))
    return ServerGroup(hosts, one_server, unquote(service), username, password)


def parse_cluster_url(url: str) -> ServerGroup:
    """
    >>> parse_cluster_url("rediss+cluster://[::1]:7000,b").hosts, parse_cluster_url("redis+cluster://a").one_server
    ((('::1', 7000), ('b', 6379)), 'redis://a:6379/')
    """
    scheme, user, hosts, path, query = _split(url, CLUSTER, PORT)
    return ServerGroup(hosts, _join(scheme, user, hosts[0], path, query))


def _split(url: str, form: str, port: int) -> tuple[str, str, tuple[Address, ...], str, str]:
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    rest, _, path = rest.partition("/")
    user, _, listed = rest.rpartition("@")
    try:
        hosts = tuple(_host(one.strip(), port) for one in listed.split(","))
    except ValueError:
        raise _unreadable(form) from None
    if len(set(hosts)) < len(hosts):
        raise ConfigurationError("The Redis URL lists the same server twice. List each server once.")
    return scheme.lower().partition("+")[0], user, hosts, path, query


def _host(text: str, port: int) -> Address:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError
        number = rest[1:]
    else:
        host, _, number = text.partition(":")
    if not host or (number and not (number.isascii() and number.isdecimal() and 0 < int(number) < 65536)):
        raise ValueError
    return unquote(host), int(number) if number else port


def _join(scheme: str, user: str, address: Address, path: str, query: str) -> str:
    host, port = address
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{scheme}://{user}{'@' if user else ''}{where}/{path}{'?' if query else ''}{query}"
