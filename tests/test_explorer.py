"""The explorer: the shipped lock keeps its rules in every interleaving of the models, and broken locks are caught."""

import re
from collections.abc import Callable
from functools import partial

import pytest

from verify import claim_models, explore, fingerprint, models
from verify.explorer import Explorer, Report
from verify.gallery import correct, page
from verify.gallery.broken import exhibits
from verify.process import Process
from verify.world import Client, Model

pytestmark = pytest.mark.timeout(600)  # a busy machine is slow
QUICK = {model.name: model for model in (*models.quick(), *claim_models.quick())}


def search(model: Model) -> Report:
    return Explorer(model).run(most_seconds=500.0)


@pytest.mark.parametrize("name", QUICK)
def test_shipped_lock_keeps_its_rules_in_every_interleaving(name: str) -> None:
    report = search(QUICK[name])
    assert report.violation is None, str(report.trace)
    assert report.complete
    assert report.schedules > report.states


@pytest.mark.parametrize("model", [*correct.models(), correct.quorum()], ids=lambda model: str(model.name))
def test_correct_locks_violate_no_rule(model: Model) -> None:
    report = search(model)
    assert report.violation is None, str(report.trace)
    assert report.complete


def test_gallery_has_every_broken_system_of_the_systems_page() -> None:
    assert {exhibit.row for exhibit in exhibits().values()} == {"", "A4", "A5", "B2", "B3", "C2", "C3", "D4", "E5"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.system(exhibit.row)] if exhibit.row else [])
        for name, exhibit in exhibits().items()
    ],
)
def test_broken_lock_is_caught_with_its_trace(name: str) -> None:
    exhibit = exhibits()[name]
    report = page.find(exhibit)
    assert report.violation is not None, f"{name} was not caught: {report.verdict}"
    assert report.violation.rule == exhibit.breaks
    assert report.seconds < page.MOST_SECONDS
    assert str(report.trace).splitlines()[-1].strip().startswith(f"violates  {exhibit.breaks}:")


def test_gallery_page_is_up_to_date() -> None:
    assert page.PAGE.read_text("utf-8") == page.page(), "run: make gallery"


async def _overwrites(me: Process) -> None:
    await me.command("SET", "door", me.name)
    me.enter()
    await me.work()


def _two(program: Callable[[Process], object]) -> list[Client]:
    return [Client(name, program) for name in "AB"]  # type: ignore[arg-type]


def test_trace_has_every_request_and_reply() -> None:
    report = search(Model("two holders", _two(_overwrites), rules=frozenset({"ME"})))
    lines = [re.sub(r"\s+", " ", line).strip() for line in str(report.trace).splitlines()]
    assert lines == [
        "0.000 s A → Server: SET door A",
        "0.000 s Server → A: OK",
        "0.000 s A enters the critical section",
        "0.000 s B → Server: SET door B",
        "0.000 s Server → B: OK",
        "0.000 s B enters the critical section",
        "violates ME: A and B hold the lock at the same time",
    ]
    assert "A->>Server: SET door A" in (report.trace.mermaid() if report.trace else "")


async def _one_request(me: Process) -> None:
    await me.command("GET", me.name)


def test_schedules_are_counted_as_paths() -> None:
    """Two clients with two transitions each (the server executes, the reply arrives): 4 over 2 orders."""
    report = search(Model("counting", _two(_one_request), rules=frozenset()))
    assert report.complete
    assert (report.states, report.schedules) == (9, 6)


def test_search_that_reaches_its_limit_is_not_complete() -> None:
    report = Explorer(QUICK["mutex"]).run(most_states=100)
    assert (report.complete, report.verdict, report.schedules) == (False, "limit reached", 0)


def test_same_model_gives_the_same_counts() -> None:
    first, second = (search(QUICK["cut subscriptions"]) for _ in range(2))
    assert (first.states, first.transitions, first.schedules) == (second.states, second.transitions, second.schedules)


def test_process_is_over_when_only_its_keepalive_is_left() -> None:
    """It holds no lease then, so its keepalive will do nothing that the models check."""
    explorer = Explorer(Model("one client", [Client("A", models.user(renew=True))], seconds=0.5))
    assert explorer.run().complete
    assert any(process.over for process in explorer.world.processes)


def test_acquisition_of_several_locks_can_be_destroyed() -> None:
    """As by an event loop that is closed during the wait: no await is possible any more."""
    process = Process("A", claim_models.all_of("door", "gate"))
    process.start(100.0)
    process.feed("reply", 1, [], 100.0)  # they are not all free
    process.feed("reply", 2, 17, 100.0)  # the first one is granted, and the second one requested
    assert len(process.beliefs()) == 1
    process.tasks[1].work.close()


def test_command_prints_a_table_and_sets_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main(["--quick", "cut"]) == 0
    assert "1 of 1 models complete" in capsys.readouterr().out
    assert explore.main(["--quick", "--most-states", "10", "cut"]) == 1
    assert "limit reached" in capsys.readouterr().out


def test_fingerprints_of_partials_include_their_keywords() -> None:
    def written(value: object) -> list[object]:
        writer = fingerprint._Writer()
        writer.write(value)
        return writer.written

    assert written(partial(print, sep="")) != written(partial(print, sep="x"))
    assert written(partial(print, sep="x")) == written(partial(print, sep="x"))
