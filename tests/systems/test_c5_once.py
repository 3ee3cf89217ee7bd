"""C5, the 02:00 job: of many who start it one runs, the others skip at once, and a quick one does not run twice."""

from typing import Any

import pytest

import lockfast
from lockfast.client.once import Skipped
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.values import Renewal
from tests.contract.driver import Driver, done, held, scenario
from tests.contract.stores import only
from tests.systems.programs import Program


async def start(job: Any) -> Any:
    """Run a job that takes no time; what its block was given."""
    async with held(job) as run:
        return run


async def ttl_left(d: Driver) -> float:
    info = await done(d.lock("report").inspect())
    return info.ttl_left or 0.0


@scenario
async def test_c5_one_runs_and_the_others_are_told_who(d: Driver) -> None:
    began, go_on = d.gate(), d.gate()

    async def run() -> Any:
        async with held(d.connect(label="web1").once("report")) as run:
            began.open()
            await go_on.passed()
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
    go_on.open()
    assert (await runner.result()).fence > 0
    assert await done(d.lock("report").locked()) is False


@scenario
async def test_c5_a_quick_job_does_not_run_again_at_once(d: Driver) -> None:
    """Also not on a machine whose clock is behind; and that it stays taken does not depend on the ttl."""
    for ttl in (30, 2):
        assert await start(d.locks.once("report", at_least=20, ttl=ttl))
        assert 10 < await ttl_left(d) <= 20
        assert not await start(d.connect().once("report", at_least=20))
        assert d.locks.keepalive.held() == [], "nobody renews what was left"
        assert await end_now(d)


async def end_now(d: Driver) -> bool:
    """End what a run left, as its time would."""
    info = await done(d.lock("report").inspect())
    (ended,) = await d.locks.store.renew([Renewal("report", info.holder, 0.001, final=True)], d.locks.runtime.now() + 5)
    await d.until(lambda: _free(d), "the name to be free")
    return bool(ended)


async def _free(d: Driver) -> bool:
    return not await done(d.lock("report").locked())


@scenario
async def test_c5_the_name_is_free_when_at_least_is_over(d: Driver) -> None:
    started = d.locks.runtime.now()
    job = d.locks.once("report", at_least=0.3)
    assert await start(job)
    again = await d.until(lambda: start(job), "the job to run again")
    assert d.locks.runtime.now() - started >= 0.3
    assert again.fence > 0


@scenario
async def test_c5_what_is_left_outlives_the_connection(d: Driver) -> None:
    """A cron job's process ends right after the job."""
    client = d.connect()
    assert await start(client.once("report", at_least=20))
    await done(client.close())
    assert not await start(d.locks.once("report"))
    assert 10 < await ttl_left(d) <= 20


@scenario
async def test_c5_once_per_period(d: Driver) -> None:
    job = d.locks.once("report", every=100)
    assert await start(job)
    assert 80 < await ttl_left(d) <= 90, "a tenth is left for early schedulers and late clocks"
    assert not await start(job)


@scenario
async def test_c5_a_run_that_failed_may_be_repeated_within_the_period(d: Driver) -> None:
    job = d.locks.once("report", every=100)
    with pytest.raises(KeyError, match="own"):
        async with held(job):
            raise KeyError("the job's own")
    assert await start(job), "it may be tried again at once"


@scenario
async def test_c5_a_run_that_failed_is_still_kept_for_at_least(d: Driver) -> None:
    with pytest.raises(KeyError):
        async with held(d.locks.once("report", every=100, at_least=20)):
            raise KeyError
    assert 10 < await ttl_left(d) <= 20


@scenario
async def test_c5_a_run_that_ends_by_sys_exit_0_succeeded(d: Driver) -> None:
    with pytest.raises(SystemExit):
        async with held(d.locks.once("report", every=100)):
            raise SystemExit(0)
    assert await ttl_left(d) > 80


@scenario
async def test_c5_a_stuck_run_is_bounded(d: Driver) -> None:
    """Past `at_most` it has lost its lease, and another runs."""
    with pytest.raises(lockfast.LeaseLost, match="max_hold"):  # noqa: PT012
        async with held(d.locks.once("report", at_most=0.2)) as run:
            await d.until(lambda: start(d.connect().once("report")), "another to run it")
            await d.until(lambda: run.state is lockfast.State.LOST, "the loss to be told")
            await done(d.pause())


@only(stores=("sqlite", "valkey9"))
@scenario
async def test_c5_a_runner_that_crashes_blocks_for_its_ttl_only(d: Driver) -> None:
    with Program("run_a_job", d.flavour, d.url, "report", 0.5) as runner:
        assert runner.line() == "running"
        assert not await start(d.locks.once("report"))
        runner.kill()
    started = d.locks.runtime.now()
    await d.until(lambda: start(d.locks.once("report")), "the job to be run by another")
    assert d.locks.runtime.now() - started < 5, "it had promised to keep the name for an hour"


@scenario
async def test_c5_busy_raise(d: Driver) -> None:
    async with held(d.connect(label="web1").once("report")):
        with pytest.raises(lockfast.AcquireTimeout, match=r"'report' was skipped: web1 .* took it") as caught:
            await start(d.locks.once("report", busy="raise"))
    assert (caught.value.name, caught.value.timeout) == ("report", 0.0)


@scenario
async def test_c5_busy_wait(d: Driver) -> None:
    async with held(d.connect().once("report")) as run:
        waiting = d.start(start, d.connect().once("report", busy="wait"))
        await d.queue_length(d.lock("report"), 1)
    assert (await waiting.result()).fence > run.fence


@scenario
async def test_c5_busy_wait_for_a_while(d: Driver) -> None:
    async with held(d.connect().once("report")):
        with pytest.raises(lockfast.AcquireTimeout):
            await start(d.locks.once("report", busy="wait", timeout=0.05))


@scenario
async def test_c5_as_a_decorator(d: Driver) -> None:
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
async def test_c5_a_function_of_the_other_colour_is_refused(d: Driver) -> None:
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
async def test_c5_bad_values(d: Driver, bad: dict[str, Any]) -> None:
    with pytest.raises(lockfast.ConfigurationError):
        d.locks.once("report", **bad)


@only(stores=("memory", "valkey9"))
@scenario
async def test_c5_a_lost_answer_to_the_last_word_is_asked_again(d: Driver) -> None:
    store = d.locks.store
    renew, asked = store.renew, []

    async def lossy(renewals: list[Renewal], until: float) -> list[bool]:
        asked.append(renewals[0])
        answer: list[bool] = await renew(renewals, until)
        if len(asked) == 1:
            raise StoreUnavailable("the reply was lost", outcome=Outcome.UNKNOWN)
        return answer

    store.renew = lossy
    assert await start(d.locks.once("report", at_least=20))
    assert [line.final for line in asked] == [True, True]
    assert asked[1].ttl < asked[0].ttl, "a repeat asks for what is left by then"
    assert 10 < await ttl_left(d) <= 20


@only(flavour="threads", stores=("memory",))
@scenario
async def test_c5_one_object_in_many_threads(d: Driver) -> None:
    job, began, go_on = d.locks.once("report"), d.gate(), d.gate()
    ran: list[bool] = []

    async def work() -> None:
        async with held(job) as run:
            if run:
                began.open()
                await go_on.passed()
            ran.append(bool(run))

    workers = [d.start(work) for _ in range(8)]
    await began.passed()
    await d.until(lambda: len(ran) == 7, "the others to skip")
    go_on.open()
    for worker in workers:
        await worker.result()
    assert sorted(ran) == [False] * 7 + [True]
    assert job._blocks == []
