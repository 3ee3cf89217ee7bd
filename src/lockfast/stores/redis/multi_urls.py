"""URLs that name several servers: redis+sentinel://host1,host2,host3/service/db and redis+cluster://host1,host2.

Rules kept here: such a URL is taken apart into its hosts and the URL of one server, and that one is read by the client
library, with all its options and checks. No message repeats a URL or a value from it, for there may be a password in
it.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from lockfast.errors import ConfigurationError

SENTINEL_SHAPE = "redis+sentinel://user:password@host1:26379,host2,host3/service/0"
CLUSTER_SHAPE = "redis+cluster://user:password@host1:6379,host2,host3"
SENTINEL_PORT = 26379
PORT = 6379


class Several(NamedTuple):
    """The servers that a URL names, the URL of one that stands for all, and what else it said."""

    hosts: tuple[tuple[str, int], ...]
    plain: str
    service: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = None

    @property
    def shown(self) -> str:
        """The hosts, as a URL has them."""
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)


def sentinel_address(url: str) -> Several:
    """What a URL with sentinels says.

    >>> found = sentinel_address("redis+sentinel://me:pw@a,b:5000/mymaster/2?sentinel_password=x&protocol=3")
    >>> found.hosts, found.service, found.plain
    ((('a', 26379), ('b', 5000)), 'mymaster', 'redis://me:pw@a:26379/2?protocol=3')
    """
    scheme, user, hosts, path, query = _parts(url, SENTINEL_SHAPE, SENTINEL_PORT)
    service, _, database = path.partition("/")
    if not service or "/" in database:
        raise _unreadable(SENTINEL_SHAPE)
    options = dict(parse_qsl(query, keep_blank_values=True))
    username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
    plain = _plain(scheme, user, hosts[0], database, urlencode(options))
    return Several(hosts, plain, unquote(service), username, password)


def cluster_address(url: str) -> Several:
    """What a URL of a cluster says.

    >>> cluster_address("rediss+cluster://[::1]:7000,b").hosts, cluster_address("redis+cluster://a").plain
    ((('::1', 7000), ('b', 6379)), 'redis://a:6379/')
    """
    scheme, user, hosts, path, query = _parts(url, CLUSTER_SHAPE, PORT)
    return Several(hosts, _plain(scheme, user, hosts[0], path, query))


def _parts(url: str, shape: str, port: int) -> tuple[str, str, tuple[tuple[str, int], ...], str, str]:
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    rest, _, path = rest.partition("/")
    user, _, listed = rest.rpartition("@")
    try:
        hosts = tuple(_host(one.strip(), port) for one in listed.split(","))
    except ValueError:
        raise _unreadable(shape) from None
    if len(set(hosts)) < len(hosts):
        raise ConfigurationError("This URL names the same server twice. Each needs to be named once.")
    return scheme.lower().partition("+")[0], user, hosts, path, query


def _host(text: str, port: int) -> tuple[str, int]:
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


def _plain(scheme: str, user: str, host: tuple[str, int], path: str, query: str) -> str:
    name, port = host
    where = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    return f"{scheme}://{user}{'@' if user else ''}{where}/{path}{'?' if query else ''}{query}"


def _unreadable(shape: str) -> ConfigurationError:
    return ConfigurationError(
        f"This URL can't be read. It should look like {shape}; special characters in a user name or password are "
        "written %40 and the like."
    )
