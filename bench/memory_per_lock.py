"""What a held lock takes of the server's memory, against a bare key with a ttl; and what a released one leaves."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial

from bench.harness import Bench, Report, Spread, in_turns, multiple, ratio
from tests.support.servers import Server
from tests.support.wire import WireClient

TITLE = "server memory"
LOCKS = 10_000
TTL_SECONDS = 600.0
SETTLE_SECONDS = 0.25
BARE = "bare key (SET PX, 20 characters)"
HELD = "holdfast, held"
RELEASED = "holdfast, released"


def measure(bench: Bench) -> Report:
    report = Report("memory_per_lock", TITLE)
    server = bench.server
    cases: dict[str, Callable[[], float]] = {
        BARE: partial(_growth, server, _set_bare_keys),
        HELD: partial(_growth, server, partial(_hold, release=False)),
        RELEASED: partial(_growth, server, partial(_hold, release=True)),
    }
    found = in_turns(cases, bench.pick(3, 1))
    server.clear()
    rows = [[name, str(Spread.of(sizes)), multiple(ratio(sizes, found[BARE]))] for name, sizes in found.items()]
    report.table(f"bytes per lock, {LOCKS:,} of them", ("", "bytes", "of a bare key"), rows)
    report.target("bytes per held lock against a bare key", ratio(found[HELD], found[BARE]), 2.5)
    report.notes.append("a released lock leaves its last fence behind for a day, so that fences never go back")
    return report


def _growth(server: Server, fill: Callable[[Server], None]) -> float:
    """Bytes per lock that filling adds to the server's own account."""
    server.clear()
    before = _settled(server)
    fill(server)
    return (_settled(server) - before) / LOCKS


def _settled(server: Server) -> int:
    """Bytes in use, once the server has finished growing its tables in the background."""
    while True:
        used = _used(server)
        time.sleep(SETTLE_SECONDS)
        if abs(_used(server) - used) < LOCKS:
            return used


def _used(server: Server) -> int:
    info: str = server.raw("INFO", "memory")
    found = re.search(r"\bused_memory:(\d+)", info)
    if found is None:
        raise RuntimeError("the server tells nothing of its memory")
    return int(found[1])


def _name(number: int) -> str:
    return f"resource:{number:06d}"


def _set_bare_keys(server: Server) -> None:
    with WireClient(server.port) as client:
        for number in range(LOCKS):
            client.call("SET", _name(number), "v" * 20, "PX", str(int(TTL_SECONDS * 1000)))


def _hold(server: Server, *, release: bool) -> None:
    import holdfast
    from holdfast.runtime.runner import run
    from holdfast.values import Ask

    locks = holdfast.connect(server.url)
    store, runtime = locks.store, locks.runtime
    for number in range(LOCKS):
        ask = Ask(_name(number), runtime.new_holder(), TTL_SECONDS, "host.example:4711:")
        run(store.acquire(ask, None, runtime.now() + 5))
        if release:
            run(store.release(ask.name, ask.holder, runtime.now() + 5))
    run(store.close())
