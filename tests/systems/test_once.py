"""`locks.once()`: of many clients that start a job one runs it, the others skip at once, and it does not run twice."""

from typing import Any

import pytest

import lockfast
from lockfast.client.once import Skipped
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.values import Renewal
from tests.contract.driver import Driver, done, held, scenario
from tests.contract.stores import only
from tests.systems.programs import Program

pytestmark = pytest.mark.system("C5")


async def start(job: Any) -> Any:
    """Run a job that takes no time; return the value of its `as`: a lease, or `Skipped`."""
    async with held(job) as run:
        return run


async def ttl_left(d: Driver) -> float:
    info = await done(d.lock("report").inspect())
    return info.ttl_left or 0.0


@scenario
async def test_one_client_runs_and_the_others_skip_and_name_it(d: Driver) -> None:
    began, finish = d.gate(), d.gate()

    async def run() -> Any:
        async with held(d.connect(label="web1").once("report")) as run:
            began.open()
            await finish.passed()
            return run

    runner = d.start(run)
    await began.passed()
    for _ in range(3):
        skipped = await start(d.connect().once("report"))
        assert not skipped
        assert isinstance(skipped, Skipped)
        assert (skipped.name, skipped.owner and skipped.owner.label) == ("report", "web1")
        assert skipped.held_for is not None
        assert "web1" in str(skipped)
    finish.open()
    assert (await runner.result()).fence > 0
    assert await done(d.lock("report").locked()) is False


@scenario
async def test_short_job_keeps_the_name_for_at_least(d: Driver) -> None:
    """So a machine whose clock is behind skips too. The ttl does not shorten `at_least`."""
    for ttl in (30, 2):
        assert await start(d.locks.once("report", at_least=20, ttl=ttl))
        assert 10 < await ttl_left(d) <= 20
        assert not await start(d.connect().once("report", at_least=20))
        assert d.locks.session.keepalive.held() == [], "the grant left behind is not renewed"
        assert await end_now(d)


async def end_now(d: Driver) -> bool:
    """Expire the grant that a run left behind."""
    info = await done(d.lock("report").inspect())
    (ended,) = await d.locks.session.store.renew(
        [Renewal("report", info.holder, 0.001, final=True)], d.locks.session.runtime.now() + 5
    )
    await d.until(lambda: _free(d), "the name to be free")
    return bool(ended)


async def _free(d: Driver) -> bool:
    return not await done(d.lock("report").locked())


@scenario
async def test_name_is_free_after_at_least(d: Driver) -> None:
    started = d.locks.session.runtime.now()
    job = d.locks.once("report", at_least=0.3)
    assert await start(job)
    again = await d.until(lambda: start(job), "the job to run again")
    assert d.locks.session.runtime.now() - started >= 0.3
    assert again.fence > 0


@scenario
async def test_at_least_outlives_the_session(d: Driver) -> None:
    """The process of a cron job ends right after the job."""
    client = d.connect()
    assert await start(client.once("report", at_least=20))
    await done(client.close())
    assert not await start(d.locks.once("report"))
    assert 10 < await ttl_left(d) <= 20


@scenario
async def test_runs_once_per_period(d: Driver) -> None:
    job = d.locks.once("report", every=100)
    assert await start(job)
    assert 80 < await ttl_left(d) <= 90, "a tenth of the period allows for early schedulers and late clocks"
    assert not await start(job)


@scenario
async def test_failed_run_can_be_repeated_within_the_period(d: Driver) -> None:
    job = d.locks.once("report", every=100)
    with pytest.raises(KeyError, match="own"):
        async with held(job):
            raise KeyError("the job's own")
    assert await start(job), "a failed run frees the name at once"


@scenario
async def test_failed_run_keeps_the_name_for_at_least(d: Driver) -> None:
    with pytest.raises(KeyError):
        async with held(d.locks.once("report", every=100, at_least=20)):
            raise KeyError
    assert 10 < await ttl_left(d) <= 20


@scenario
async def test_sys_exit_0_counts_as_success(d: Driver) -> None:
    with pytest.raises(SystemExit):
        async with held(d.locks.once("report", every=100)):
            raise SystemExit(0)
    assert await ttl_left(d) > 80


@scenario
async def test_stuck_run_loses_its_lease_after_at_most(d: Driver) -> None:
    with pytest.raises(lockfast.LeaseLost, match="max_hold"):  # noqa: PT012
        async with held(d.locks.once("report", at_most=0.2)) as run:
            await d.until(lambda: start(d.connect().once("report")), "another client to run the job")
            await d.until(lambda: run.state is lockfast.State.LOST, "the lease to be lost")
            await done(d.pause())


@only(stores=("sqlite", "valkey9"))
@scenario
async def test_crashed_runner_blocks_for_its_ttl_only(d: Driver) -> None:
    with Program("run_a_job", d.flavour, d.url, "report", 0.5) as runner:
        assert runner.line() == "running"
        assert not await start(d.locks.once("report"))
        runner.kill()
    started = d.locks.session.runtime.now()
    await d.until(lambda: start(d.locks.once("report")), "another client to run the job")
    assert d.locks.session.runtime.now() - started < 5, "its at_least was an hour"


@scenario
async def test_busy_raise(d: Driver) -> None:
    async with held(d.connect(label="web1").once("report")):
        with pytest.raises(lockfast.AcquireTimeout, match=r"'report' was skipped: web1 .* started it") as caught:
            await start(d.locks.once("report", busy="raise"))
    assert (caught.value.name, caught.value.timeout) == ("report", 0.0)


@scenario
async def test_busy_wait(d: Driver) -> None:
    async with held(d.connect().once("report")) as run:
        waiting = d.start(start, d.connect().once("report", busy="wait"))
        await d.queue_length(d.lock("report"), 1)
    assert (await waiting.result()).fence > run.fence


@scenario
async def test_busy_wait_with_a_timeout(d: Driver) -> None:
    async with held(d.connect().once("report")):
        with pytest.raises(lockfast.AcquireTimeout):
            await start(d.locks.once("report", busy="wait", timeout=0.05))


@scenario
async def test_decorator(d: Driver) -> None:
    async def report(day: str, *, pages: int = 1) -> tuple[str, int, bool]:
        """Writes the report."""
        return day, pages, await done(d.lock("report").locked())

    job = d.locks.once("report", at_least=20)(d.function(report))
    assert (job.__name__, job.__doc__) == ("report", "Writes the report.")
    assert await done(job("monday", pages=3)) == ("monday", 3, True)
    skipped = await done(job("monday"))
    assert isinstance(skipped, Skipped)
    assert skipped.owner is not None


@scenario
async def test_function_of_the_other_flavour_is_refused(d: Driver) -> None:
    async def wrong() -> None: ...

    def right() -> None: ...

    with pytest.raises(lockfast.ConfigurationError):
        d.locks.once("report")(wrong if d.flavour == "threads" else right)


@only(stores=("memory",))
@pytest.mark.parametrize(
    "bad",
    [
        {"at_least": -1},
        {"at_least": "10"},
        {"at_least": 20, "at_most": 10},
        {"at_least": 20, "every": 10},
        {"every": 0},
        {"at_most": 0},
        {"busy": "queue"},
        {"busy": None},
        {"max_hold": 3},
        {"renew": False},
        {"surprise": 1},
    ],
    ids=str,
)
@scenario
async def test_invalid_options(d: Driver, bad: dict[str, Any]) -> None:
    with pytest.raises(lockfast.ConfigurationError):
        d.locks.once("report", **bad)


@only(stores=("memory", "valkey9"))
@scenario
async def test_lost_reply_to_the_final_renewal_is_retried(d: Driver) -> None:
    store = d.locks.session.store
    renew, sent = store.renew, []

    async def lossy(renewals: list[Renewal], until: float) -> list[bool]:
        sent.append(renewals[0])
        answer: list[bool] = await renew(renewals, until)
        if len(sent) == 1:
            raise StoreUnavailable("the reply was lost", outcome=Outcome.UNKNOWN)
        return answer

    store.renew = lossy
    assert await start(d.locks.once("report", at_least=20))
    assert [renewal.final for renewal in sent] == [True, True]
    assert sent[1].ttl < sent[0].ttl, "a retry requests the remaining time only"
    assert 10 < await ttl_left(d) <= 20


@only(flavour="threads", stores=("memory",))
@scenario
async def test_one_object_in_many_threads(d: Driver) -> None:
    job, began, finish = d.locks.once("report"), d.gate(), d.gate()
    ran: list[bool] = []

    async def work() -> None:
        async with held(job) as run:
            if run:
                began.open()
                await finish.passed()
            ran.append(bool(run))

    workers = [d.start(work) for _ in range(8)]
    await began.passed()
    await d.until(lambda: len(ran) == 7, "the others to skip")
    finish.open()
    for worker in workers:
        await worker.result()
    assert sorted(ran) == [False] * 7 + [True]
    assert job._scopes == []
