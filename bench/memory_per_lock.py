"""Server memory of a held lock and of a released lock, against a bare key with a ttl."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from bench.harness import Bench, Report, Spread, in_turns, multiple, ratio
from tests.support.servers import Server

TITLE = "server memory"
LOCKS = (1_000, 10_000, 100_000)
BATCH = 500
"""Requests that are sent before their replies are read."""
TTL_SECONDS = 600.0
SETTLE_SECONDS = 0.25
BARE = "bare key (SET PX, 20 characters)"
HELD = "lockfast, held"
RELEASED = "lockfast, released"


def measure(bench: Bench) -> Report:
    report = Report("memory_per_lock", TITLE)
    server = bench.server
    sizes = bench.pick(LOCKS, LOCKS[:2])
    columns = ("", "bytes", "against a bare key")
    held: dict[int, float | None] = {}
    for locks in sizes:
        cases: dict[str, Callable[[], float]] = {
            BARE: partial(_growth, server, _bare, locks),
            HELD: partial(_growth, server, partial(_held, release=False), locks),
            RELEASED: partial(_growth, server, partial(_held, release=True), locks),
        }
        found = in_turns(cases, bench.pick(2, 1))
        rows = [[name, str(Spread.of(each)), multiple(ratio(each, found[BARE]))] for name, each in found.items()]
        report.table(f"bytes per lock, {locks:,} of them", columns, rows)
        held[locks] = ratio(found[HELD], found[BARE])
    server.clear()
    report.target(f"bytes per held lock against a bare key, {sizes[1]:,} locks", held[sizes[1]], 2.5)
    report.notes.append("the store keeps the last fence of a released lock for a day, so that fences never decrease")
    return report


def _growth(server: Server, requests_of: Callable[[Server, int], Iterator[bytes]], locks: int) -> float:
    """Bytes per lock, as reported by the server."""
    server.clear()
    requests = requests_of(server, locks)
    before = _settled(server, locks)
    with socket.create_connection((server.host, server.port)) as connection:
        while batch := list(islice(requests, BATCH)):
            connection.sendall(b"".join(batch))
            _read(connection, len(batch))
    return (_settled(server, locks) - before) / locks


def _read(connection: socket.socket, replies: int) -> None:
    """Read replies of one line each."""
    lines = 0
    while lines < replies:
        data = connection.recv(65536)
        if not data or b"-" in data[:1]:
            raise RuntimeError(f"The server refused a request: {data[:80]!r}")
        lines += data.count(b"\n")


def _settled(server: Server, locks: int) -> int:
    """Bytes in use, after the server has resized its tables in the background."""
    while True:
        used = _used(server)
        time.sleep(SETTLE_SECONDS)
        if abs(_used(server) - used) < locks:
            return used


def _used(server: Server) -> int:
    info: str = server.raw("INFO", "memory")
    found = re.search(r"\bused_memory:(\d+)", info)
    if found is None:
        raise RuntimeError("The server does not report its memory.")
    return int(found[1])


def _name(number: int) -> str:
    return f"resource:{number:06d}"


def _bare(_: Server, locks: int) -> Iterator[bytes]:
    from lockfast.stores.redis.protocol.resp import pack

    ttl_ms = b"%d" % int(TTL_SECONDS * 1000)
    return (pack(b"SET", _name(number).encode(), b"v" * 20, b"PX", ttl_ms) for number in range(locks))


def _held(server: Server, locks: int, *, release: bool) -> Iterator[bytes]:
    """The requests of the client, without the client: only the server is measured."""
    from lockfast.runtime.base import new_holder_id
    from lockfast.stores.redis import store
    from lockfast.stores.redis.lua import scripts
    from lockfast.values import Claim

    for script in (scripts.ACQUIRE, scripts.RELEASE):
        server.raw("SCRIPT", "LOAD", script.text)  # before the measurement starts

    def requests() -> Iterator[bytes]:
        for number in range(locks):
            claim = Claim(_name(number), new_holder_id(), TTL_SECONDS, "host.example:4711:")
            yield store.acquire_request(claim, None)
            if release:
                yield store.release_request(claim.name, claim.holder)

    return requests()
