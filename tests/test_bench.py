"""Upper bounds for requests, commands, connections and function calls, which are the same on every machine.

If a count falls, lower its bound here, so that it cannot rise again unnoticed.
"""

import asyncio
import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import FrameType
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import lockfast
import lockfast.aio
from bench import pages, plots
from bench.__main__ import CLAIMS, stolen_time
from bench.harness import Report, Spread, Verdict, in_turns, jain, laid_out, percentile, ratio
from lockfast.core import local_handoff
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until

CYCLES = 20
HANDOFFS = 6
COMMANDS_PER_CYCLE = {"evalsha": 2, "time": 1, "exists": 1, "get": 1, "set": 2, "zpopmin": 1, "del": 1}
CALLS_PER_CYCLE = 87
"""Calls of Python and C functions in the thread of the caller."""
ASYNCIO_CALLS_PER_CYCLE = 191
CALLS_PER_LOCAL_HANDOFF = 101
"""Calls per hold of tasks with local hand-off, including those of the event loop."""


def commands(requests: list[list[bytes]]) -> Counter[str]:
    return Counter(request[0].decode().upper() for request in requests)


def cycle(lock: lockfast.Lock, count: int = CYCLES) -> None:
    for _ in range(count):
        with lock:
            pass


def test_an_uncontended_cycle_is_two_requests(proxy: FaultProxy) -> None:
    with lockfast.connect(proxy.url) as locks:
        lock = locks.lock("thing")
        cycle(lock, 1)  # connects and sends the scripts
        before = len(proxy.requests)
        cycle(lock)
        assert commands(proxy.requests[before:]) == {"EVALSHA": 2 * CYCLES}
        assert proxy.connections == 1


async def test_an_uncontended_cycle_is_two_requests_with_asyncio(proxy: FaultProxy) -> None:
    async with lockfast.aio.connect(proxy.url) as locks:
        lock = locks.lock("thing")
        async with lock:
            pass
        before = len(proxy.requests)
        for _ in range(CYCLES):
            async with lock:
                pass
        assert commands(proxy.requests[before:]) == {"EVALSHA": 2 * CYCLES}
        assert proxy.connections == 1


def test_an_uncontended_cycle_runs_a_fixed_set_of_commands(any_server: Server) -> None:
    with lockfast.connect(any_server.url) as locks:
        lock = locks.lock("thing")
        cycle(lock, 2)  # the first grant finds no earlier fence
        any_server.raw("CONFIG", "RESETSTAT")
        cycle(lock)
        counted = any_server.commands_processed()
    expected = {name: calls * CYCLES for name, calls in COMMANDS_PER_CYCLE.items()}
    assert {name: calls for name, calls in counted.items() if not name.startswith("config")} == expected


def test_a_script_is_sent_in_full_once(proxy: FaultProxy) -> None:
    with lockfast.connect(proxy.url) as first, lockfast.connect(proxy.url) as second:
        cycle(first.lock("thing"))
        cycle(second.lock("another"))
        assert commands(proxy.requests)["EVAL"] == 2  # one to acquire, one to release


def test_a_hand_off_between_two_clients_costs_a_ping(valkey: Server, proxy: FaultProxy) -> None:
    """An acquisition with a wait takes two requests, and a client that was the first waiter sends a PING before its
    release. The first wait after an acquisition without one takes a third request."""
    with lockfast.connect(proxy.url) as one, lockfast.connect(proxy.url) as other:
        locks = [one.lock("thing"), other.lock("thing")]
        hand_off(valkey, locks, 3)  # both connect, subscribe and load the scripts
        before = len(proxy.requests)
        hand_off(valkey, locks, HANDOFFS)
        counted = commands(proxy.requests[before:])
        assert counted == {"EVALSHA": 2 * (HANDOFFS + 1) + 1, "PING": HANDOFFS}
        assert proxy.connections == 4  # per client one for requests and one for notifications


def test_every_other_hand_off_in_a_longer_queue_costs_a_ping(valkey: Server, proxy: FaultProxy) -> None:
    """Three clients take turns: each enqueues again while another one waits before it."""
    with ExitStack() as stack:
        locks = [stack.enter_context(lockfast.connect(proxy.url)).lock("thing") for _ in range(3)]
        lease = locks[0].acquire()
        waiters = [start_waiter(valkey, locks[1], 1), start_waiter(valkey, locks[2], 2)]
        for number in range(3 * HANDOFFS):
            if number == 3:  # each is connected and subscribed, and has loaded the scripts
                before = len(proxy.requests)
            assert lease is not None
            lease.release()
            thread, got = waiters.pop(0)
            thread.join()
            lease = got[0]
            waiters.append(start_waiter(valkey, locks[number % 3], 2))
        counted = commands(proxy.requests[before:])
        for thread, got in waiters:
            assert lease is not None
            lease.release()
            thread.join()
            lease = got[0]
    handoffs = 3 * HANDOFFS - 3
    assert counted["EVALSHA"] == 2 * handoffs
    assert abs(counted["PING"] - handoffs / 2) <= 1.5, counted  # each client counts for itself


def hand_off(server: Server, locks: list[lockfast.Lock], handoffs: int) -> None:
    """Hold the lock with each of two clients in turn; the next one waits before each release."""
    lease = locks[0].acquire()
    for number in range(1, handoffs + 1):
        with waiting(server, locks[number % 2]) as got:
            assert lease is not None
            lease.release()
        lease = got[0]
    assert lease is not None
    lease.release()


@contextmanager
def waiting(server: Server, lock: lockfast.Lock) -> Iterator[list[lockfast.Lease | None]]:
    """A thread that waits for `lock`; it has its lease at the end of the block."""
    thread, got = start_waiter(server, lock, 1)
    yield got
    thread.join()


def start_waiter(
    server: Server, lock: lockfast.Lock, position: int
) -> tuple[threading.Thread, list[lockfast.Lease | None]]:
    """Start a thread that waits for `lock` at that position; return it with a list for its lease."""
    got: list[lockfast.Lease | None] = []
    thread = threading.Thread(target=lambda: got.append(lock.acquire(timeout=10)))
    thread.start()
    await_waiters(server, lock.name, position)
    return thread, got


def await_waiters(server: Server, name: str, count: int) -> None:
    until(lambda: server.raw("ZCARD", f"lockfast:{{{name}}}:q") == count, f"{count} waiters")


def test_waiting_threads_share_two_connections(valkey: Server, proxy: FaultProxy) -> None:
    with lockfast.connect(proxy.url) as locks:
        lease = locks.lock("thing").acquire()
        assert lease is not None
        threads = [threading.Thread(target=cycle, args=(locks.lock("thing"), 1)) for _ in range(40)]
        for thread in threads:
            thread.start()
        await_waiters(valkey, "thing", 40)
        assert proxy.connections == 2
        lease.release()
        for thread in threads:
            thread.join()
        assert proxy.connections == 2


async def test_waiting_tasks_share_two_connections(valkey: Server, proxy: FaultProxy) -> None:
    async def hold() -> None:
        async with locks.lock("thing"):
            pass

    async with lockfast.aio.connect(proxy.url) as locks:
        lease = await locks.lock("thing").acquire()
        assert lease is not None
        tasks = [asyncio.create_task(hold()) for _ in range(200)]
        await asyncio.to_thread(await_waiters, valkey, "thing", 200)
        assert proxy.connections == 2
        await lease.release()
        await asyncio.gather(*tasks)
        assert proxy.connections == 2


@contextmanager
def calls_counted() -> Iterator[list[int]]:
    """Count the function calls of the block in this thread, including C functions."""
    counted = [0]

    def count(_: FrameType, event: str, __: Any) -> None:
        if event in ("call", "c_call"):
            counted[0] += 1

    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def test_a_cycle_stays_within_its_calls(valkey: Server) -> None:
    with lockfast.connect(valkey.url) as locks:
        lock = locks.lock("thing")
        cycle(lock)
        with calls_counted() as counted:
            cycle(lock)
    assert counted[0] / CYCLES <= CALLS_PER_CYCLE


async def test_a_cycle_stays_within_its_calls_with_asyncio(valkey: Server) -> None:
    async with lockfast.aio.connect(valkey.url) as locks:
        lock = locks.lock("thing")
        async with lock:
            pass
        with calls_counted() as counted:
            for _ in range(CYCLES):
                async with lock:
                    pass
    assert counted[0] / CYCLES <= ASYNCIO_CALLS_PER_CYCLE


@pytest.fixture
def unlimited_local_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a slow machine, no time limit ends local hand-off."""
    for name in ("SPAN", "PATIENCE", "LONG_PATIENCE"):
        monkeypatch.setattr(local_handoff, name, 60.0)
    monkeypatch.setattr(local_handoff, "EXTRA", 61.0)


@pytest.mark.usefixtures("unlimited_local_handoff")
async def test_a_local_hand_off_stays_within_its_calls() -> None:
    held, marks = 0, {10 * CYCLES: asyncio.Event(), 20 * CYCLES: asyncio.Event()}

    async def compete(lock: lockfast.aio.Lock) -> None:
        nonlocal held
        while held < 21 * CYCLES:
            async with lock:
                held += 1
                if held in marks:
                    marks[held].set()

    async with lockfast.aio.connect("memory://calls") as locks, asyncio.TaskGroup() as group:
        async with locks.lock("thing"):  # otherwise the first task would end before the second starts
            for _ in range(CYCLES):
                group.create_task(compete(locks.lock("thing")))
            await asyncio.sleep(0)
        first, last = marks.values()
        await first.wait()
        before = held
        with calls_counted() as counted:
            await last.wait()
        holds = held - before
    assert counted[0] / holds <= CALLS_PER_LOCAL_HANDOFF


def test_cycles_leak_no_memory(valkey: Server) -> None:
    with lockfast.connect(valkey.url) as locks:
        lock = locks.lock("thing")
        cycle(lock, 100)
        gc.collect()
        before = sys.getallocatedblocks()
        cycle(lock, 500)
        gc.collect()
        assert sys.getallocatedblocks() - before < 100


@pytest.mark.usefixtures("unlimited_local_handoff")
def test_local_hand_off_between_threads_needs_few_requests(proxy: FaultProxy) -> None:
    """Eight threads compete: most holds are local hand-offs, so there are far fewer than two requests per hold."""
    with lockfast.connect(proxy.url) as locks:
        lock = locks.lock("thing")
        cycle(lock, 1)
        before = len(proxy.requests)
        start = threading.Barrier(8)

        def work() -> None:
            start.wait()
            for _ in range(50):
                with lock:
                    time.sleep(0.0002)  # the others wait meanwhile

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert commands(proxy.requests[before:])["EVALSHA"] < 8 * 50


def test_the_pages_match_the_results() -> None:
    found = json.loads(pages.RESULTS.read_text("utf-8"))
    assert pages.PAGE.read_text("utf-8") == pages.page(found), "run: make bench-docs"
    readme = pages.README.read_text("utf-8")
    assert readme == pages.with_table(readme, found), "run: make bench-docs"
    for claim, report in found["claims"].items():
        for at, figure in enumerate(report["figures"]):
            assert (pages.PLOTS / f"{claim}-{at}.svg").read_text("utf-8") == plots.bars(figure), "run: make bench-docs"


def test_a_plot_is_readable_in_both_themes() -> None:
    drawn = plots.bars({"title": "a < b", "unit": "ms", "values": {"lockfast": 1, "x": 90}, "less_is_better": True})
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in drawn
    assert "ms, less is better, logarithmic" in drawn


def test_the_page_lists_losses() -> None:
    figure = {
        "title": "waits",
        "unit": "ms",
        "values": {"lockfast": 2.0, "x": 1.0, "floor: y": 0.1},
        "less_is_better": True,
    }
    report = Report("some", "a title")
    report.target("missed", 0.7, 0.6)
    claims = {"some": {**report.as_json(), "figures": [figure], "missing": {"z": "not installed"}}}
    text = pages.page({"circumstances": {"load": "none"}, "claims": claims})
    assert "was missed: 0.7×, wanted ≤ 0.6×" in text
    assert "waits: x has 1.00 ms, lockfast 2.00 ms" in text
    assert "floor: y has" not in text
    assert "z was not measured in some: not installed" in text


def test_the_readme_shows_two_targets_of_a_claim_and_all_missed_ones() -> None:
    report = Report("handoff", "two processes")
    for what, measured in (("first", 0.4), ("late", 0.7), ("second", 0.5), ("third", 0.3)):
        report.target(what, measured, 0.6)
    figure = {"title": "waits", "unit": "ms", "values": {"lockfast": 2.0}, "less_is_better": True}
    found = {
        "circumstances": {"system": "Linux", "load": "none"},
        "claims": {"handoff": {**report.as_json(), "figures": [figure]}},
    }
    text = pages.with_table("\n".join(pages.MARKS), found)
    rows = [[cell.strip() for cell in line.split("|")[2:6]] for line in text.splitlines() if "two processes" in line]
    assert rows == [
        ["first", "0.4×", "≤ 0.6×", "ok"],
        ["late", "0.7×", "≤ 0.6×", "**missed**"],
        ["second", "0.5×", "≤ 0.6×", "ok"],
    ]


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_has_a_title_and_a_measure_function(name: str) -> None:
    claim = import_module(f"bench.{name}")
    assert claim.TITLE
    assert callable(claim.measure)


def test_peers_take_turns_in_changing_order() -> None:
    order: list[str] = []

    def case(name: str) -> Callable[[], int]:
        def run() -> int:
            order.append(name)
            return len(order)

        return run

    found = in_turns({name: case(name) for name in "abc"}, 20)
    rounds = ["".join(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({one[0] for one in rounds}) == 3, "the order never changes"
    assert found["a"] == [at + 1 for at, name in enumerate(order) if name == "a"]


def test_a_run_reports_the_stolen_cpu_time() -> None:
    before, after = [50, 0, 0, 1000, 0, 0, 0, 10], [130, 0, 10, 5000, 0, 0, 0, 20]
    assert stolen_time(before, after) == "took 10 % of this machine's busy CPU time"
    assert "does not report" in stolen_time([], [])


def test_a_ratio_pairs_the_rounds() -> None:
    assert ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == 0.5
    assert ratio([1.0], []) is None


def test_medians_percentiles_and_fairness() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)
    assert (percentile([1, 2, 3, 4], 0.5), percentile([1, 2, 3, 4], 0.99)) == (2, 4)
    assert (jain([5, 5]), jain([10, 0])) == (1.0, 0.5)


def test_a_report_lists_missed_targets_and_missing_peers() -> None:
    report = Report("some", "a title")
    report.table("times", ("", "µs"), [("ours", 1.234), ("theirs", 1234)])
    report.missing["peer"] = "not installed"
    report.target("kept", 0.5, 0.6)
    report.target("missed", 0.7, 0.6)
    report.target("unknown", None, 1.0)
    text = report.text()
    assert "ok: kept" in text
    assert "MISSED: missed: 0.7× (wanted ≤ 0.6×)" in text
    assert "not measured: unknown" in text
    assert "missing: peer (not installed)" in text
    assert laid_out(("", "µs"), [("ours", 1.234)]) == "|      |   µs |\n|------|-----:|\n| ours | 1.23 |"
    assert Verdict("fair", 0.999, 0.99, "", at_least=True).word == "ok"
