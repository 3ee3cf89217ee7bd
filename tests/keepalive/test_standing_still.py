"""A process that did not run for longer than its ttl: it knows by its own clock, before it hears from anyone."""

import asyncio
import ctypes
import time
from pathlib import Path
from typing import Any

import pytest

import lockfast.aio
from lockfast import LeaseLost, State
from lockfast.runtime.base import now
from tests.keepalive.listening import SLACK, Listener
from tests.keepalive.measuring import note
from tests.keepalive.programs import Program
from tests.support.lateness import lateness
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Flavour

pytestmark = pytest.mark.timing

TTL = 0.4
PLACES = ("memory", "sqlite", "valkey")


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "valkey":
        server: Server = request.getfixturevalue("valkey")
        return server.url
    return f"sqlite:///{tmp_path}/locks.db" if request.param == "sqlite" else f"memory://{tmp_path}"


def hog_the_gil(seconds: float) -> None:
    """A call into C that does not let go of the interpreter lock: no thread of Python runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


class TestAStoppedProcess:
    """SIGSTOP past its ttl, then SIGCONT."""

    @pytest.mark.parametrize("flavour", ["threads", "asyncio"])
    def test_knows_it_at_once(self, valkey: Server, flavour: str) -> None:
        with Program(f"frozen_{flavour}", valkey.url, TTL) as program:
            assert program.line() == "held"
            program.freeze()
            until(lambda: not valkey.raw("EXISTS", "report"), "the lock to expire")
            assert valkey.raw("SET", "report", "another", "NX", "PX", "60000") == "OK"
            thawed_at = program.thaw()
            found = program.report()
            code, log = program.end()
        assert code == 0
        assert len(log.splitlines()) == 1, "one line in the log: that the lease was lost"
        assert found["held"] is False or found["seen_at"] == found["woken"], "ensure_held() was right at once"
        assert found["woken"], "lost.wait() or the end of the block told"
        (heard_at,) = found["heard"]
        note("loss told after SIGCONT", (heard_at - thawed_at) * 1000)
        assert heard_at - thawed_at < SLACK + lateness()
        if flavour == "asyncio":
            note("body cancelled after SIGCONT", (found["woken"] - thawed_at) * 1000)
            assert found["woken"] - thawed_at < SLACK + lateness()
        assert valkey.raw("GET", "report") == "another", "the next holder is left alone"


class TestAHoggedInterpreter:
    def test_is_told_when_it_runs_again(self, url: str, flavour: Flavour, listener: Listener) -> None:
        client = flavour.connect(url)
        lease = client.acquire("report", ttl=TTL, **listener.options)
        hog_the_gil(2 * TTL)
        runs_again_at = now()
        state: State = lease.state if flavour.name == "threads" else State.LOST
        assert state is State.LOST, "in the very instant"
        (call,) = listener.wait_for("lost")
        note("loss told after a GIL hog", (call.at - runs_again_at) * 1000)
        assert call.at - runs_again_at < SLACK + lateness()
        with pytest.raises(LeaseLost):
            client.do(lease.ensure_held)
        assert client.do(lambda: lease.lost.wait(20)) is True
        assert listener.words() == ["lost"]


class TestABlockedEventLoop:
    async def test_cancels_the_body_at_its_next_await(self, url: str, listener: Listener) -> None:
        went_on: list[str] = []
        async with lockfast.aio.connect(url) as locks:
            with pytest.raises(LeaseLost):  # noqa: PT012
                async with locks.lock("report", ttl=TTL, **listener.options) as lease:
                    await asyncio.sleep(0)
                    time.sleep(2 * TTL)  # noqa: ASYNC251
                    runs_again_at = now()
                    with pytest.raises(LeaseLost):
                        lease.ensure_held()
                    try:
                        await asyncio.sleep(5)
                        went_on.append("after the await")
                    finally:
                        cancelled_at = now()
            note("body cancelled after a blocked loop", (cancelled_at - runs_again_at) * 1000)
            assert went_on == []
            assert cancelled_at - runs_again_at < SLACK + lateness()
            await _until(listener.words)
        assert listener.words() == ["lost"]
        note("loss told after a blocked loop", (listener.calls[0].at - runs_again_at) * 1000)
        assert listener.calls[0].at - runs_again_at < SLACK + lateness()

    async def test_of_which_the_body_does_not_await_again(self, url: str) -> None:
        async with lockfast.aio.connect(url) as locks:
            with pytest.raises(LeaseLost):
                async with locks.lock("report", ttl=TTL):
                    time.sleep(2 * TTL)  # noqa: ASYNC251
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0.01)


async def _until(check: Any) -> None:
    async with asyncio.timeout(20):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
