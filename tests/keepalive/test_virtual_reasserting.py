"""A store that forgot, by a manual clock: when a lease is taken back in, when it is lost, and that it says which."""

import logging
from collections.abc import Iterator

import pytest

from lockfast import LeaseLost, State
from lockfast.errors import StoreUnavailable
from lockfast.stores.memory import Space
from lockfast.values import Claim
from tests.keepalive.virtual import World

TTL = 3.0


class Forgetful(World):
    """`answers` are what the store gives to those who re-assert, in turn; the last one for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Claim, int]] = []
        self.answers: list[bool | Exception] = [True]
        self.store.capabilities = self.store.capabilities._replace(reassert=True)
        self.store.on_reassert = self._reassert
        self.takes_until: float | None = None

    async def _reassert(self, claim: Claim, fence: int, until: float) -> bool:
        self.asked.append((claim, fence))
        if self.takes_until is not None:
            await self.time.sleep(self.takes_until - self.time.now())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if answer:
            self.store.space.acquire(claim, None, self.time.now())
        return answer

    def reset(self) -> None:
        """As a master that takes over without ever having heard of the lock."""
        self.store.space = Space(lambda *_: False, lambda: round(self.time.now() * 1e6))


@pytest.fixture
def world() -> Iterator[Forgetful]:
    world = Forgetful()
    yield world
    world.time.close()


def test_a_valid_lease_is_taken_back_in(world: Forgetful, caplog: pytest.LogCaptureFixture) -> None:
    lease = world.acquire(ttl=TTL)
    world.reset()
    with caplog.at_level(logging.WARNING, "lockfast"):
        world.time.run_for(TTL)
    assert (lease.state, lease.reasserted, world.words()) == (State.HELD, 1, [])
    ((claim, fence),) = world.asked
    assert (claim.holder, fence) == (lease.holder, lease.fence)
    assert "re-asserted" in caplog.text


def test_a_lease_that_another_took_is_lost(world: Forgetful) -> None:
    world.answers = [False]
    lease = world.acquire(ttl=TTL)
    world.reset()
    world.time.run_for(TTL)
    assert (lease.state, lease.reasserted, world.words()) == (State.LOST, 0, ["lost"])
    with pytest.raises(LeaseLost, match="another client was faster"):
        lease.ensure_held()


def test_no_answer_means_asking_again(world: Forgetful) -> None:
    world.answers = [StoreUnavailable("away"), StoreUnavailable("away"), True]
    lease = world.acquire(ttl=TTL)
    world.reset()
    world.time.run_for(TTL)
    assert (lease.state, lease.reasserted) == (State.HELD, 1)
    assert world.words() == ["risk"]


def test_no_answer_until_the_deadline_means_lost(world: Forgetful) -> None:
    world.answers = [StoreUnavailable("away")]
    lease = world.acquire(ttl=TTL)
    world.reset()
    world.time.run_for(TTL)
    assert (lease.state, lease.reasserted) == (State.LOST, 0)
    assert world.words() == ["risk", "lost"]


def test_an_answer_after_the_deadline_comes_too_late(world: Forgetful) -> None:
    """What it wrote is nobody's, and is given back."""
    lease = world.acquire(ttl=TTL)
    world.reset()
    world.takes_until = world.time.now() + 1.5 * TTL
    world.time.run_for(2 * TTL)
    assert (lease.state, lease.reasserted, world.words()[-1]) == (State.LOST, 0, "lost")
    assert world.store.holder("thing") is None


def test_a_renewal_by_hand_takes_it_back_in_too(world: Forgetful) -> None:
    lease = world.acquire(ttl=TTL, renew=False)
    world.reset()
    world.time.do(lease.renew())
    assert (lease.state, lease.reasserted) == (State.HELD, 1)


def test_a_store_that_does_not_do_it_is_not_asked(world: Forgetful) -> None:
    world.store.capabilities = world.store.capabilities._replace(reassert=False)
    lease = world.acquire(ttl=TTL)
    world.reset()
    world.time.run_for(TTL)
    assert (lease.state, world.asked) == (State.LOST, [])
