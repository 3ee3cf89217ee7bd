"""Rivals on virtual servers with random faults: never a valid writer beside another lease, and fences that grow.

A seed decides everything, so a failure can be repeated. Messages are delayed, lost with their connection and reordered;
servers stop, and in half of the runs restart without persistence while the clients use `sits_out`.
"""

import asyncio
from random import Random

import pytest

from lockfast.core.lease_state import valid_until
from lockfast.core.quorum.store import QuorumStore
from lockfast.errors import StoreUnavailable
from lockfast.values import Claim, Enqueue, Granted, GrantNotification, Queued, Renewal
from tests.quorum.virtual import LATENCY, NAME, Server, World, claim, play, reading

TTL = 2.0
SECONDS = 20.0
SKEW = 0.1
"""Seconds by which the servers' clocks may differ."""


class Monitor:
    """Knows every lease, by holder, and checks the two promises.

    A fence must be greater than those of all earlier grants that exclude it: for a reader, than the writers' fences.
    """

    def __init__(self) -> None:
        self.valid_until: dict[str, float] = {}
        self.readers: set[str] = set()
        self.last_fence = self.last_writer = 0
        self.grants = self.reads = self.shared_reads = 0

    def hold(self, holder: str, until: float, now: float) -> None:
        others = {other for other, end in self.valid_until.items() if end > now and other != holder}
        excluded = others - self.readers if holder in self.readers else others
        assert not excluded, f"{holder} and {excluded} both hold the lock at {now:.3f}"
        self.shared_reads += bool(others)
        self.valid_until[holder] = until

    def grant(self, claim: Claim, fence: int, until: float, now: float) -> None:
        if claim.weight:
            self.readers.add(claim.holder)
        self.hold(claim.holder, until, now)
        last = self.last_writer if claim.weight else self.last_fence
        assert fence > last, f"{claim.holder} got fence {fence} after {last}"
        self.last_fence = max(self.last_fence, fence)
        if claim.weight:
            self.reads += 1
        else:
            self.last_writer = fence
        self.grants += 1

    def end(self, holder: str) -> None:
        self.valid_until.pop(holder, None)
        self.readers.discard(holder)


class Rival:
    """A client that acquires, holds, renews and releases until the time is up.

    `reads` is the share of its claims that are shared. If there are any, half of its writers are downgraded.
    """

    def __init__(
        self, name: str, world: World, store: QuorumStore, monitor: Monitor, random: Random, reads: float
    ) -> None:
        self._name = name
        self._reads = reads
        self._world = world
        self._store = store
        self._monitor = monitor
        self._random = random

    async def run(self) -> None:
        end = self._world.now + SECONDS
        number = 0
        while self._world.now < end:
            number += 1
            reads = self._reads > 0 and self._random.random() < self._reads
            wanted = (reading if reads else claim)(f"{self._name}{number}", TTL)
            try:
                lease = await (self._try(wanted) if self._random.random() < 0.5 else self._wait(wanted))
                if lease is not None:
                    self._monitor.grant(wanted, *lease, self._world.now)
                    await self._hold(wanted)
            except StoreUnavailable:
                pass
            self._monitor.end(wanted.holder)
            try:
                await self._store.release(NAME, wanted.holder, self._world.now + 0.5)
            except StoreUnavailable:
                pass  # it expires
            await asyncio.sleep(self._random.random() * 0.1)

    async def _try(self, wanted: Claim) -> tuple[int, float] | None:
        sent_at = self._world.now
        answer = await self._store.acquire(wanted, None, sent_at + 0.5)
        return (answer.fence, valid_until(sent_at, TTL)) if isinstance(answer, Granted) else None

    async def _wait(self, wanted: Claim) -> tuple[int, float] | None:
        mailbox = self._store.mailbox(wanted.holder)
        try:
            await mailbox.open(self._world.now + 0.5)
            ticket = None
            for attempt in range(1, 8):
                sent_at = self._world.now
                answer = await self._store.acquire(wanted, Enqueue(mailbox.address, attempt, ticket), sent_at + 0.5)
                if isinstance(answer, Granted):
                    return answer.fence, valid_until(sent_at, TTL)
                assert isinstance(answer, Queued)
                ticket = answer.ticket
                found = await mailbox.wait(sent_at + TTL / 3)
                if isinstance(found, GrantNotification) and found.attempt == attempt:
                    return found.fence, valid_until(sent_at, TTL)
            return None
        finally:
            mailbox.close()

    async def _hold(self, wanted: Claim) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(self._random.random() * TTL / 3)
            sent_at = self._world.now
            shared = wanted.holder in self._monitor.readers
            renewed: bool | None
            if self._reads and not shared and self._random.random() < 0.5:
                self._monitor.readers.add(wanted.holder)  # before the request, because the outcome may stay unknown
                renewed = await self._store.downgrade(reading(wanted.holder, TTL), sent_at + 0.5)
            else:
                renewals = [Renewal(NAME, wanted.holder, TTL, shared=shared)]
                (renewed,) = await self._store.renew(renewals, sent_at + 0.5)
            if self._world.now >= self._monitor.valid_until[wanted.holder] or renewed is False:
                return
            if renewed:
                self._monitor.hold(wanted.holder, valid_until(sent_at, TTL), self._world.now)


async def disturb(server: Server, random: Random, *, forgets: bool) -> None:
    while True:
        await asyncio.sleep(random.random() * 3)
        fault = random.randrange(4 if forgets else 3)
        if fault == 0:
            server.delay_requests(random.random() * 0.4)
        elif fault == 1:
            server.delay_replies(random.random() * 0.4)
        elif fault == 2:
            server.stop()
        else:
            server.restart()
        await asyncio.sleep(random.random())
        server.delay_requests(LATENCY)
        server.delay_replies(LATENCY)
        server.start()


def simulate(seed: int, reads: float = 0.0) -> Monitor:
    monitor = Monitor()
    random = Random(seed)
    forgets = seed % 2 == 1

    async def scenario(world: World) -> None:
        count = 3 if seed % 4 < 2 else 5
        world = World(world.loop, count, [random.random() * SKEW for _ in range(count)] if forgets else ())
        sits_out = TTL if forgets else 0.0
        rivals = [
            Rival(name, world, world.client(sits_out=sits_out), monitor, Random(f"{seed}{name}"), reads)
            for name in ("abcd" if reads else "abc")
        ]
        faults = [asyncio.ensure_future(disturb(server, random, forgets=forgets)) for server in world.servers]
        await asyncio.gather(*(rival.run() for rival in rivals))
        for fault in faults:
            fault.cancel()

    play(scenario)
    return monitor


@pytest.mark.parametrize("seed", range(6))
def test_one_valid_lease_and_growing_fences(seed: int) -> None:
    assert simulate(seed).grants > 10


@pytest.mark.parametrize("seed", range(12))
def test_no_valid_writer_beside_a_reader_or_a_writer(seed: int) -> None:
    monitor = simulate(seed, reads=0.6)
    assert monitor.grants > 10
    assert 0 < monitor.reads < monitor.grants
    assert monitor.shared_reads


@pytest.mark.faults
@pytest.mark.parametrize("first", [100, 125, 150, 175])
@pytest.mark.parametrize("reads", [0.0, 0.3, 0.6, 0.9])
def test_the_same_holds_for_many_seeds(reads: float, first: int) -> None:
    assert sum(simulate(seed, reads).grants for seed in range(first, first + 25)) > 500
