"""A release and a renewal at the same time: whichever is executed first, the lock is free afterwards."""

import random
import time
from functools import partial
from typing import Any

import pytest

from lockfast import State
from tests.keepalive.callbacks import CallbackRecorder
from tests.keepalive.virtual import World
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Flavour
from tests.traps.observation import on

SHORT, LONG = 500, 10_000
ROUNDS = pytest.mark.parametrize(
    "rounds", [SHORT, pytest.param(LONG, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
TTL = 3.0
DELAYS = (0.0, 0.0, 0.001, 0.01, 0.02, 0.2)


def test_with_random_delays_of_each_request() -> None:
    """With a virtual clock, and harder than a network: requests may overtake each other."""
    randomness = random.Random(20261115)
    world = World()
    for _ in range(LONG):
        world.store.delays = {
            kind: (randomness.choice(DELAYS), randomness.choice(DELAYS)) for kind in ("renew", "release")
        }
        lease = world.acquire(ttl=TTL)
        outcome: list[bool] = []
        world.time.run_for(TTL / 3 - TTL / 24 + randomness.choice((-0.01, -0.001, 0.0, 0.001, 0.005, 0.01, 0.15, 0.3)))
        world.time.spawn(lambda lease=lease, outcome=outcome: _release(lease, outcome), "release")  # type: ignore[misc]
        world.time.run_for(0.5)
        assert outcome == [True]
        assert lease.state is State.RELEASED
        assert world.store.holder("thing") is None, "the lock is free"
        released_at = next(one.at for one in reversed(world.store.requests) if one.kind == "release")
        assert not any(one.at > released_at for one in world.store.renewals()), "no renewal after the release"
        world.store.requests.clear()
    world.time.run_for(2 * TTL)
    assert world.store.holder("thing") is None
    assert world.store.requests == []
    assert "lost" not in world.kinds()
    world.time.close()


async def _release(lease: Any, outcome: list[bool]) -> None:
    outcome.append(await lease.release())


@ROUNDS
def test_on_a_network_that_delays_either(
    flavour: Flavour, valkey: Server, proxy: FaultProxy, callbacks: CallbackRecorder, rounds: int
) -> None:
    """The keepalive gets a report of a change, and renews the lock in the moment in which it is released."""
    randomness = random.Random(20261115)
    client = flavour.connect(proxy.url).warm_up()
    names = [f"report {number}" for number in range(4)]
    for round_ in range(rounds):
        name = names[round_ % len(names)]
        rule = None
        if round_ % 5 == 0:
            delay = proxy.delay_requests if randomness.random() < 0.5 else proxy.delay_replies
            rule = delay(on(name), randomness.choice((0.0005, 0.002, 0.004)))
        lease = client.acquire(name, ttl=10, timeout=1, **callbacks.options)
        client.do(partial(client.locks.session.keepalive._on_change, name))
        _pause(randomness.choice((0.0, 0.0, 0.0001, 0.0003, 0.001)))
        assert client.release(lease) is True
        assert valkey.raw("EXISTS", name) == 0, f"still held in round {round_}"
        if rule is not None:
            rule.release()
    until(lambda: client.do(client.locks.session.keepalive.held) == [], "the keepalive to drop all leases")
    assert [name for name in names if valkey.raw("EXISTS", name)] == []
    assert callbacks.kinds() == []


def _pause(seconds: float) -> None:
    """Wait without sleeping, because a sleep takes longer."""
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at:
        pass
