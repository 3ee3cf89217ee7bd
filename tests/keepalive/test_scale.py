"""Ten thousand leases of one client: few requests, little CPU, one thread or task, and constant memory."""

import gc
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from lockfast import Locks, State
from lockfast.core.lease_state import ALIVE
from tests.keepalive.measurements import note
from tests.keepalive.virtual import World
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Flavour

MANY = 10_000
TTL = 30.0
LEAST_PER_REQUEST = 250


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.time.close()


@pytest.mark.parametrize("spread", [0.0, TTL / 3], ids=["at once", "one after the other"])
def test_few_requests(world: World, spread: float) -> None:
    """In whatever order the leases began, they are soon renewed together."""
    for number in range(MANY):
        world.acquire(f"thing {number}", ttl=TTL)
        world.time.run_for(spread / MANY)
    world.time.run_for(TTL)
    world.store.requests.clear()
    world.time.run_for(2 * TTL)
    requests = world.store.renewals()
    renewals = sum(len(request.names) for request in requests)
    assert renewals >= 5 * MANY, "each a third of its ttl after the last"
    assert note("requests for a thousand renewals", 1000 * len(requests) / renewals, "") <= 1000 / LEAST_PER_REQUEST
    assert world.time.spawned.count("keepalive") == 1
    assert world.time.spawned.count("renewal") == 0


@pytest.mark.timeout(120)
def test_little_cpu(valkey: Server, flavour: Flavour) -> None:
    """Measured in CPU time, so that other processes do not matter."""
    client = flavour.connect(valkey.url)
    others = set(threading.enumerate())
    leases = client.do(lambda: _acquire(client.locks))
    renewals, requests = _renewed(valkey)
    used = time.process_time()
    for cycle in range(1, 4):
        client.do(lambda: _hurry(client.locks.session.keepalive))
        wanted = renewals + cycle * MANY
        until(lambda: _renewed(valkey)[0] >= wanted, "renewals", 30, pause=0.05)  # noqa: B023
    used = time.process_time() - used
    renewals_after, requests_after = _renewed(valkey)
    done = renewals_after - renewals
    assert done / (requests_after - requests) >= LEAST_PER_REQUEST
    share = used / done * MANY / (TTL / 3)
    assert note(f"share of a core, {MANY} leases with a ttl of {TTL:g} s, {flavour.name}", share * 100, "%") < 2
    started = {thread.name for thread in threading.enumerate() if thread not in others}
    late = {"lockfast-renewal"}  # one more if an answer is late because the machine is busy
    assert started - late == ({"lockfast-keepalive"} if flavour.name == "threads" else set())
    assert {client.state(lease) for lease in leases[::100]} <= ALIVE
    valkey.clear()


def _acquire(locks: Any) -> Any:
    """Acquire all leases; on asyncio the list must be awaited."""
    names = [f"thing {number}" for number in range(MANY)]
    if isinstance(locks, Locks):
        return [locks.lock(name, ttl=TTL).acquire() for name in names]

    async def acquire() -> list[Any]:
        return [await locks.lock(name, ttl=TTL).acquire() for name in names]

    return acquire()


def _hurry(keepalive: Any) -> None:
    """Make all renewals due, as if a third of the ttl had passed."""
    now = keepalive._runtime.now()
    for lease_state in keepalive.held():
        lease_state.next_renewal = now
    keepalive._wake()


def _renewed(server: Server) -> tuple[int, int]:
    """How many leases were renewed so far, and by how many requests."""
    commands = server.commands_processed()
    return commands.get("pexpire", 0), commands.get("evalsha", 0)


@pytest.mark.parametrize("count", [1000, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
def test_constant_memory(world: World, count: int) -> None:
    leases = [world.acquire(f"thing {number}", ttl=TTL) for number in range(count)]
    world.time.run_for(2 * TTL)
    tracemalloc.start()
    try:
        used = []
        for _ in range(11):
            world.time.run_for(TTL)
            world.store.requests.clear()
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    growth = (used[-1] - used[0]) / count
    assert note("bytes by which a lease grew in ten ttls", growth, "bytes") < 20
    assert {lease.state for lease in leases} == {State.HELD}
