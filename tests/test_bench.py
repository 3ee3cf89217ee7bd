"""A guard against getting slower, by counts: requests, commands, connections, calls; the same on every machine.

A count that falls is good news: lower it here too, so that it does not rise again unseen.
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
from bench.__main__ import CLAIMS, stolen
from bench.harness import Report, Spread, Verdict, in_turns, jain, laid_out, percentile, ratio
from lockfast.core import local_handoff as passing
from lockfast.core import local_queue as rooms
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until

CYCLES = 20
PASSINGS = 6
COMMANDS_PER_CYCLE = {"evalsha": 2, "time": 1, "exists": 1, "get": 1, "set": 2, "zpopmin": 1, "del": 1}
CALLS_PER_CYCLE = 70
"""Python and C functions entered, in the caller's thread."""
ASYNCIO_CALLS_PER_CYCLE = 183
CALLS_PER_PASSED_HOLD = 89
"""Of tasks that pass a lock on among themselves, the event loop's own included."""


def commands(requests: list[list[bytes]]) -> Counter[str]:
    return Counter(request[0].decode().upper() for request in requests)


def cycle(lock: lockfast.Lock, count: int = CYCLES) -> None:
    for _ in range(count):
        with lock:
            pass


def test_an_uncontended_cycle_is_two_requests(proxy: FaultProxy) -> None:
    with lockfast.connect(proxy.url) as locks:
        lock = locks.lock("thing")
        cycle(lock, 1)  # dials, and sends the scripts once
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


def test_what_an_uncontended_cycle_has_the_server_do(any_server: Server) -> None:
    with lockfast.connect(any_server.url) as locks:
        lock = locks.lock("thing")
        cycle(lock, 2)  # the first grant of all finds no fence to go on from
        any_server.raw("CONFIG", "RESETSTAT")
        cycle(lock)
        counted = any_server.commands_processed()
    expected = {name: calls * CYCLES for name, calls in COMMANDS_PER_CYCLE.items()}
    assert {name: calls for name, calls in counted.items() if not name.startswith("config")} == expected


def test_a_script_is_sent_in_full_only_once(proxy: FaultProxy) -> None:
    with lockfast.connect(proxy.url) as first, lockfast.connect(proxy.url) as second:
        cycle(first.lock("thing"))
        cycle(second.lock("another"))
        assert commands(proxy.requests)["EVAL"] == 2  # one to acquire, one to release


def test_a_hand_over_between_two_costs_a_ping(valkey: Server, proxy: FaultProxy) -> None:
    """Each acquisition is two requests though each of them had to wait for its turn, and who was the first to wait puts
    a PING in front of its release."""
    with lockfast.connect(proxy.url) as one, lockfast.connect(proxy.url) as other:
        locks = [one.lock("thing"), other.lock("thing")]
        pass_on(valkey, locks, 3)  # both dial, subscribe and load the scripts
        before = len(proxy.requests)
        pass_on(valkey, locks, PASSINGS)
        counted = commands(proxy.requests[before:])
        assert counted == {"EVALSHA": 2 * (PASSINGS + 1), "PING": PASSINGS}
        assert proxy.connections == 4  # of each client one for requests and one for grants


def test_in_a_longer_queue_every_other_hand_over_costs_a_ping(valkey: Server, proxy: FaultProxy) -> None:
    """Three in turns: each comes again while another waits before it."""
    with ExitStack() as stack:
        locks = [stack.enter_context(lockfast.connect(proxy.url)).lock("thing") for _ in range(3)]
        lease = locks[0].acquire()
        lines = [stand_in_line(valkey, locks[1], 1), stand_in_line(valkey, locks[2], 2)]
        for number in range(3 * PASSINGS):
            if number == 3:  # each has dialled, subscribed and loaded the scripts
                before = len(proxy.requests)
            assert lease is not None
            lease.release()
            thread, got = lines.pop(0)
            thread.join()
            lease = got[0]
            lines.append(stand_in_line(valkey, locks[number % 3], 2))
        counted = commands(proxy.requests[before:])
        for thread, got in lines:
            assert lease is not None
            lease.release()
            thread.join()
            lease = got[0]
    handed_over = 3 * PASSINGS - 3
    assert counted["EVALSHA"] == 2 * handed_over
    assert abs(counted["PING"] - handed_over / 2) <= 1.5, counted  # each of the three counts by itself


def pass_on(server: Server, locks: list[lockfast.Lock], passings: int) -> None:
    """Hold the lock here and there in turn; whoever comes next waits before it is given back."""
    lease = locks[0].acquire()
    for number in range(1, passings + 1):
        with waiting(server, locks[number % 2]) as got:
            assert lease is not None
            lease.release()
        lease = got[0]
    assert lease is not None
    lease.release()


@contextmanager
def waiting(server: Server, lock: lockfast.Lock) -> Iterator[list[lockfast.Lease | None]]:
    """A thread that stands in line for `lock`; it has its lease when the block has ended."""
    thread, got = stand_in_line(server, lock, 1)
    yield got
    thread.join()


def stand_in_line(
    server: Server, lock: lockfast.Lock, enqueue: int
) -> tuple[threading.Thread, list[lockfast.Lease | None]]:
    """A thread that waits for `lock` in that place, and what it will have got when it ends."""
    got: list[lockfast.Lease | None] = []
    thread = threading.Thread(target=lambda: got.append(lock.acquire(timeout=10)))
    thread.start()
    await_waiters(server, lock.name, enqueue)
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
    """How many functions the block enters, those written in C too, in this thread."""
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
def passed_on_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, nobody asks the store because its time is up."""
    for name in ("SPAN", "PATIENCE", "LONG_PATIENCE"):
        monkeypatch.setattr(rooms, name, 60.0)
    monkeypatch.setattr(passing, "EXTRA", 61.0)


@pytest.mark.usefixtures("passed_on_for_long")
async def test_a_lock_that_is_passed_on_stays_within_its_calls() -> None:
    held, marks = 0, {10 * CYCLES: asyncio.Event(), 20 * CYCLES: asyncio.Event()}

    async def live(lock: lockfast.aio.Lock) -> None:
        nonlocal held
        while held < 21 * CYCLES:
            async with lock:
                held += 1
                if held in marks:
                    marks[held].set()

    async with lockfast.aio.connect("memory://calls") as locks, asyncio.TaskGroup() as group:
        async with locks.lock("thing"):  # else the first would be done before the second has begun
            for _ in range(CYCLES):
                group.create_task(live(locks.lock("thing")))
            await asyncio.sleep(0)
        first, last = marks.values()
        await first.wait()
        before = held
        with calls_counted() as counted:
            await last.wait()
        holds = held - before
    assert counted[0] / holds <= CALLS_PER_PASSED_HOLD


def test_cycles_leave_no_memory_behind(valkey: Server) -> None:
    with lockfast.connect(valkey.url) as locks:
        lock = locks.lock("thing")
        cycle(lock, 100)
        gc.collect()
        before = sys.getallocatedblocks()
        cycle(lock, 500)
        gc.collect()
        assert sys.getallocatedblocks() - before < 100


@pytest.mark.usefixtures("passed_on_for_long")
def test_threads_that_share_a_lock_pass_it_on_without_requests(proxy: FaultProxy) -> None:
    """Eight threads at it all the time: a request now and then instead of two each time, though nothing is certain but
    that most of them are passed on."""
    with lockfast.connect(proxy.url) as locks:
        lock = locks.lock("thing")
        cycle(lock, 1)
        before = len(proxy.requests)
        start = threading.Barrier(8)

        def work() -> None:
            start.wait()
            for _ in range(50):
                with lock:
                    time.sleep(0.0002)  # the others come meanwhile

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert commands(proxy.requests[before:])["EVALSHA"] < 8 * 50


def test_the_pages_are_what_the_results_say() -> None:
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


def test_a_page_says_where_we_lose() -> None:
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
    assert "z could not be measured in some: not installed" in text


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_can_be_measured(name: str) -> None:
    claim = import_module(f"bench.{name}")
    assert claim.TITLE
    assert callable(claim.measure)


def test_peers_take_turns() -> None:
    order: list[str] = []

    def case(name: str) -> Callable[[], int]:
        def take_turn() -> int:
            order.append(name)
            return len(order)

        return take_turn

    found = in_turns({name: case(name) for name in "abc"}, 20)
    rounds = ["".join(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({one[0] for one in rounds}) == 3, "the same comes first, and always after the same"
    assert found["a"] == [at + 1 for at, name in enumerate(order) if name == "a"]


def test_a_run_says_how_much_of_the_time_its_host_gave_to_others() -> None:
    before, after = [50, 0, 0, 1000, 0, 0, 0, 10], [130, 0, 10, 5000, 0, 0, 0, 20]
    assert stolen(before, after) == "took away 10 % of the time in which this machine had something to do"
    assert "does not say" in stolen([], [])


def test_a_ratio_compares_only_what_was_measured_together() -> None:
    assert ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == 0.5
    assert ratio([1.0], []) is None


def test_figures() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)
    assert (percentile([1, 2, 3, 4], 0.5), percentile([1, 2, 3, 4], 0.99)) == (2, 4)
    assert (jain([5, 5]), jain([10, 0])) == (1.0, 0.5)


def test_a_report_says_what_was_missed_and_who_is_missing() -> None:
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
