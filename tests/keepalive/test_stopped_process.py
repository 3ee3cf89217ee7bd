"""A process that did not run for longer than its ttl detects the loss by its own clock, before any message."""

import asyncio
import ctypes
import time
from pathlib import Path
from typing import Any

import pytest

import lockfast.aio
from lockfast import LeaseLost, State
from lockfast.runtime.base import now
from tests.keepalive.callbacks import SLACK, CallbackRecorder
from tests.keepalive.measurements import note
from tests.keepalive.programs import Program
from tests.support.lateness import lateness
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Flavour

pytestmark = pytest.mark.timing

TTL = 0.4
STORES = ("memory", "sqlite", "valkey")


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "valkey":
        server: Server = request.getfixturevalue("valkey")
        return server.url
    return f"sqlite:///{tmp_path}/locks.db" if request.param == "sqlite" else f"memory://{tmp_path}"


def block_the_interpreter(seconds: float) -> None:
    """Call a C function that keeps the interpreter lock: no Python thread runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


class TestAStoppedProcess:
    """SIGSTOP past its ttl, then SIGCONT."""

    @pytest.mark.parametrize("flavour", ["threads", "asyncio"])
    def test_detects_the_loss_at_once(self, valkey: Server, flavour: str) -> None:
        with Program(f"frozen_{flavour}", valkey.url, TTL) as program:
            assert program.line() == "held"
            program.freeze()
            until(lambda: not valkey.raw("EXISTS", "report"), "the lock to expire")
            assert valkey.raw("SET", "report", "another", "NX", "PX", "60000") == "OK"
            thawed_at = program.thaw()
            found = program.report()
            code, log = program.end()
        assert code == 0
        assert len(log.splitlines()) == 1, "one line in the log: the lost lease"
        assert found["held"] is False or found["seen_at"] == found["woken"], "ensure_held() was right at once"
        assert found["woken"], "lost.wait() or the end of the block reported it"
        (reported_at,) = found["reported"]
        note("loss reported after SIGCONT", (reported_at - thawed_at) * 1000)
        assert reported_at - thawed_at < SLACK + lateness()
        if flavour == "asyncio":
            note("body cancelled after SIGCONT", (found["woken"] - thawed_at) * 1000)
            assert found["woken"] - thawed_at < SLACK + lateness()
        assert valkey.raw("GET", "report") == "another", "the next holder is not affected"


class TestABlockedInterpreter:
    def test_reports_the_loss_when_it_runs_again(self, url: str, flavour: Flavour, callbacks: CallbackRecorder) -> None:
        client = flavour.connect(url)
        lease = client.acquire("report", ttl=TTL, **callbacks.options)
        block_the_interpreter(2 * TTL)
        runs_again_at = now()
        state: State = lease.state if flavour.name == "threads" else State.LOST
        assert state is State.LOST, "at once"
        (call,) = callbacks.wait_for("lost")
        note("loss reported after the interpreter was blocked", (call.at - runs_again_at) * 1000)
        assert call.at - runs_again_at < SLACK + lateness()
        with pytest.raises(LeaseLost):
            client.do(lease.ensure_held)
        assert client.do(lambda: lease.lost.wait(20)) is True
        assert callbacks.kinds() == ["lost"]


class TestABlockedEventLoop:
    async def test_cancels_the_body_at_its_next_await(self, url: str, callbacks: CallbackRecorder) -> None:
        reached: list[str] = []
        async with lockfast.aio.connect(url) as locks:
            with pytest.raises(LeaseLost):  # noqa: PT012
                async with locks.lock("report", ttl=TTL, **callbacks.options) as lease:
                    await asyncio.sleep(0)
                    time.sleep(2 * TTL)  # noqa: ASYNC251
                    runs_again_at = now()
                    with pytest.raises(LeaseLost):
                        lease.ensure_held()
                    try:
                        await asyncio.sleep(5)
                        reached.append("after the await")
                    finally:
                        cancelled_at = now()
            note("body cancelled after a blocked loop", (cancelled_at - runs_again_at) * 1000)
            assert reached == []
            assert cancelled_at - runs_again_at < SLACK + lateness()
            await _until(callbacks.kinds)
        assert callbacks.kinds() == ["lost"]
        note("loss reported after a blocked loop", (callbacks.calls[0].at - runs_again_at) * 1000)
        assert callbacks.calls[0].at - runs_again_at < SLACK + lateness()

    async def test_raises_at_the_end_of_a_body_that_does_not_await(self, url: str) -> None:
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
