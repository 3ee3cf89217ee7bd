"""Re-asserting with a virtual clock: which leases are restored after a failover, and which are lost."""

import logging
from collections.abc import Iterator

import pytest

from lockfast import LeaseLost, State
from lockfast.errors import StoreUnavailable
from lockfast.stores.memory import Space
from lockfast.values import Claim
from tests.keepalive.virtual import World

TTL = 3.0


class FailoverWorld(World):
    """A store that can lose its grants. `answers` are its answers to re-assertions; the last one is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[Claim, int]] = []
        self.answers: list[bool | Exception] = [True]
        self.store.capabilities = self.store.capabilities._replace(reassert=True)
        self.store.on_reassert = self._reassert
        self.takes_until: float | None = None

    async def _reassert(self, claim: Claim, fence: int, until: float) -> bool:
        self.requests.append((claim, fence))
        if self.takes_until is not None:
            await self.time.sleep(self.takes_until - self.time.now())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if answer:
            self.store.space.acquire(claim, None, self.time.now())
        return answer

    def fail_over(self) -> None:
        """A replica without the lock becomes the master."""
        self.store.space = Space(lambda *_: False, lambda: round(self.time.now() * 1e6))


@pytest.fixture
def world() -> Iterator[FailoverWorld]:
    world = FailoverWorld()
    yield world
    world.time.close()


def test_a_valid_lease_is_restored(world: FailoverWorld, caplog: pytest.LogCaptureFixture) -> None:
    lease = world.acquire(ttl=TTL)
    world.fail_over()
    with caplog.at_level(logging.WARNING, "lockfast"):
        world.time.run_for(TTL)
    assert (lease.state, lease.reasserted, world.kinds()) == (State.HELD, 1, [])
    ((claim, fence),) = world.requests
    assert (claim.holder, fence) == (lease.holder, lease.fence)
    assert "re-asserted" in caplog.text


def test_a_lease_is_lost_if_another_client_was_faster(world: FailoverWorld) -> None:
    world.answers = [False]
    lease = world.acquire(ttl=TTL)
    world.fail_over()
    world.time.run_for(TTL)
    assert (lease.state, lease.reasserted, world.kinds()) == (State.LOST, 0, ["lost"])
    with pytest.raises(LeaseLost, match="another client was faster"):
        lease.ensure_held()


def test_no_answer_means_a_retry(world: FailoverWorld) -> None:
    world.answers = [StoreUnavailable("away"), StoreUnavailable("away"), True]
    lease = world.acquire(ttl=TTL)
    world.fail_over()
    world.time.run_for(TTL)
    assert (lease.state, lease.reasserted) == (State.HELD, 1)
    assert world.kinds() == ["risk"]


def test_no_answer_until_the_deadline_means_lost(world: FailoverWorld) -> None:
    world.answers = [StoreUnavailable("away")]
    lease = world.acquire(ttl=TTL)
    world.fail_over()
    world.time.run_for(TTL)
    assert (lease.state, lease.reasserted) == (State.LOST, 0)
    assert world.kinds() == ["risk", "lost"]


def test_an_answer_after_the_deadline_is_too_late(world: FailoverWorld) -> None:
    """The grant that it restored is removed."""
    lease = world.acquire(ttl=TTL)
    world.fail_over()
    world.takes_until = world.time.now() + 1.5 * TTL
    world.time.run_for(2 * TTL)
    assert (lease.state, lease.reasserted, world.kinds()[-1]) == (State.LOST, 0, "lost")
    assert world.store.holder("thing") is None


def test_a_manual_renewal_restores_it_too(world: FailoverWorld) -> None:
    lease = world.acquire(ttl=TTL, renew=False)
    world.fail_over()
    world.time.do(lease.renew())
    assert (lease.state, lease.reasserted) == (State.HELD, 1)


def test_a_store_without_the_capability_gets_no_request(world: FailoverWorld) -> None:
    world.store.capabilities = world.store.capabilities._replace(reassert=False)
    lease = world.acquire(ttl=TTL)
    world.fail_over()
    world.time.run_for(TTL)
    assert (lease.state, world.requests) == (State.LOST, [])
