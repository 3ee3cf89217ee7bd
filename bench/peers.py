"""The other lock libraries, each used as `with lock:` with the same ttl and otherwise its own defaults.

A peer is imported in the measured process, never in the benchmark itself. All run as pip installs them, without the
compiled parser hiredis, which is an optional extra of redis-py and of lockfast. Some tables have a row for redis-py
with hiredis.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from bench.children import with_hiredis

TTL = 10
"""Whole seconds, because python-redis-lock truncates fractions."""

Lock = AbstractContextManager[Any]
Make = Callable[[str, str], Lock]
"""Create a lock from a URL (or path) and a name; it can be acquired many times."""


class Peer(NamedTuple):
    name: str
    package: str
    make: Make

    @property
    def absent(self) -> str | None:
        """The reason why the peer cannot be measured, or None."""
        if not self.package:
            return None
        try:
            version(self.package)
        except PackageNotFoundError:
            return f"the package {self.package} is not installed"
        return None


def lockfast_lock(url: str, name: str) -> Lock:
    import lockfast

    return lockfast.connect(url).lock(name, ttl=TTL)


def _client(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url)


def redis_py_lock(url: str, name: str) -> Lock:
    lock: Lock = _client(url).lock(name, timeout=TTL)
    return lock


def redis_py_lock_hiredis(url: str, name: str) -> Lock:
    with_hiredis()
    return redis_py_lock(url, name)


def redis_py_lock_1ms(url: str, name: str) -> Lock:
    lock: Lock = _client(url).lock(name, timeout=TTL, sleep=0.001)
    return lock


def python_redis_lock(url: str, name: str) -> Lock:
    import redis_lock

    lock: Lock = redis_lock.Lock(_client(url), name, expire=TTL)
    return lock


def pottery_lock(url: str, name: str) -> Lock:
    import pottery

    lock: Lock = pottery.Redlock(key=name, masters={_client(url)}, auto_release_time=TTL)
    return lock


def sherlock_lock(url: str, name: str) -> Lock:
    import sherlock

    lock: Lock = sherlock.RedisLock(name, client=_client(url), expire=TTL)
    return lock


class _RawLock:
    """The floor: the two commands that a lock needs, on a bare socket, without checks."""

    def __init__(self, url: str, name: str) -> None:
        host, _, port = url.removeprefix("redis://").split("/")[0].partition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = name.encode()
        self._acquire = _packed(b"SET", key, b"v" * 20, b"NX", b"PX", b"%d" % (TTL * 1000))
        self._release = _packed(b"DEL", key)

    def __enter__(self) -> None:
        self._socket.sendall(self._acquire)
        self._socket.recv(4096)

    def __exit__(self, *_: object) -> None:
        self._socket.sendall(self._release)
        self._socket.recv(4096)


class _RawScripts(_RawLock):
    """The floor with lockfast's scripts: the cost of fence, queue and owner on the server."""

    def __init__(self, url: str, name: str) -> None:
        from lockfast.stores.redis import store
        from lockfast.stores.redis.lua import scripts
        from lockfast.values import Claim

        super().__init__(url, name)
        for script in (scripts.ACQUIRE, scripts.RELEASE):
            self._socket.sendall(_packed(b"SCRIPT", b"LOAD", script.text))
            self._socket.recv(4096)
        self._acquire = store.acquire_request(Claim(name, "v" * 20, float(TTL), "host:4711:"), None)
        self._release = store.release_request(name, "v" * 20)


def _packed(*args: bytes) -> bytes:
    return b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args)


def redis_py_commands(url: str, name: str) -> Lock:
    client = _client(url)

    class Commands:
        def __enter__(self) -> None:
            client.set(name, "v" * 20, nx=True, px=TTL * 1000)

        def __exit__(self, *_: object) -> None:
            client.delete(name)

    return Commands()


def file_lock(path: str, name: str) -> Lock:
    import filelock

    return filelock.FileLock(f"{path}.{name}.filelock")


def port_lock(path: str, name: str) -> Lock:
    import portalocker

    # Its default timeout is five seconds; the other peers wait without limit.
    lock: Lock = portalocker.Lock(f"{path}.{name}.portalocker", timeout=60)
    return lock


def sqlite_lock(path: str, name: str) -> Lock:
    import lockfast

    return lockfast.connect(f"sqlite:///{path}").lock(name, ttl=TTL)


LOCKFAST = Peer("lockfast", "", lockfast_lock)
REDIS_PY = Peer("redis-py Lock", "redis", redis_py_lock)
REDIS_PY_HIREDIS = Peer("redis-py Lock, with hiredis", "hiredis", redis_py_lock_hiredis)
REDIS_PY_1MS = Peer("redis-py Lock, 1 ms poll", "redis", redis_py_lock_1ms)
PYTHON_REDIS_LOCK = Peer("python-redis-lock", "python-redis-lock", python_redis_lock)
POTTERY = Peer("pottery", "pottery", pottery_lock)
SHERLOCK = Peer("sherlock", "sherlock", sherlock_lock)
RAW = Peer("floor: raw socket", "", _RawLock)
RAW_SCRIPTS = Peer("floor: raw socket, our scripts", "", _RawScripts)
COMMANDS = Peer("floor: redis-py commands", "redis", redis_py_commands)
SQLITE = Peer("lockfast, SQLite", "", sqlite_lock)
FILELOCK = Peer("filelock", "filelock", file_lock)
PORTALOCKER = Peer("portalocker", "portalocker", port_lock)
