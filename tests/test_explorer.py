"""The explorer: the shipped lock holds in every interleaving of the small models, and broken locks are caught."""

import re
from collections.abc import Callable
from functools import partial

import pytest

from verify import explore, fingerprint, models
from verify.explorer import Explorer, Report
from verify.gallery import correct as good
from verify.gallery import page as gallery
from verify.gallery.broken import exhibits
from verify.gallery.exhibit import Process
from verify.world import Client, Model

pytestmark = pytest.mark.timeout(600)  # a busy machine may take its time
QUICK = {model.name: model for model in models.quick()}


def search(model: Model, **limits: float) -> Report:
    return Explorer(model).run(most_seconds=limits.get("most_seconds", 500.0))


@pytest.mark.parametrize("name", QUICK)
def test_the_shipped_lock_keeps_its_rules_in_every_interleaving(name: str) -> None:
    report = search(QUICK[name])
    assert report.violation is None, str(report.trace)
    assert report.complete
    assert report.schedules > report.states


@pytest.mark.parametrize("model", [*good.models(), good.quorum()], ids=lambda model: str(model.name))
def test_the_checker_is_silent_on_good_locks(model: Model) -> None:
    report = search(model)
    assert report.violation is None, str(report.trace)
    assert report.complete


def _row_and_name(name: str) -> str:
    return "-".join(filter(None, (exhibits()[name].row, name)))


def test_every_row_of_broken_systems_is_in_the_gallery() -> None:
    assert {shown.row for shown in exhibits().values()} == {"", "A4", "A5", "B2", "B3", "C2", "C3", "D4", "E5"}


@pytest.mark.parametrize("name", exhibits(), ids=_row_and_name)
def test_broken_locks_are_caught_with_their_trace(name: str) -> None:
    shown = exhibits()[name]
    report = gallery.find(shown)
    assert report.violation is not None, f"{name} was not caught: {report.verdict}"
    assert report.violation.rule == shown.breaks
    assert report.seconds < gallery.MOST_SECONDS
    assert str(report.trace).splitlines()[-1].strip().startswith(f"broken  {shown.breaks}:")


def test_the_gallery_page_is_what_the_run_writes() -> None:
    assert gallery.PAGE.read_text("utf-8") == gallery.page(), "run: make gallery"


async def _overwrites(me: Process) -> None:
    await me.command("SET", "door", me.name)
    me.enters()
    await me.work()


def _two(program: Callable[[Process], object]) -> list[Client]:
    return [Client(name, program) for name in "AB"]  # type: ignore[arg-type]


def test_a_trace_tells_who_did_what_when_and_what_was_answered() -> None:
    report = search(Model("two holders", _two(_overwrites), rules=frozenset({"ME"})))
    lines = [re.sub(r"\s+", " ", line).strip() for line in str(report.trace).splitlines()]
    assert lines == [
        "0.000 s A → Server: SET door A",
        "0.000 s Server → A: OK",
        "0.000 s A enters: it takes the lock for its own",
        "0.000 s B → Server: SET door B",
        "0.000 s Server → B: OK",
        "0.000 s B enters: it takes the lock for its own",
        "broken ME: A and B hold the lock at the same time",
    ]
    assert "A->>Server: SET door A" in (report.trace.mermaid() if report.trace else "")


async def _two_steps(me: Process) -> None:
    await me.command("GET", me.name)


def test_schedules_are_counted_as_paths() -> None:
    """Two clients with two moves each (the server executes, the reply arrives): 4 over 2 orders of them."""
    report = search(Model("counting", _two(_two_steps), rules=frozenset()))
    assert report.complete
    assert (report.states, report.schedules) == (9, 6)


def test_a_search_that_is_cut_short_says_so() -> None:
    report = Explorer(QUICK["mutex"]).run(most_states=100)
    assert (report.complete, report.verdict, report.schedules) == (False, "limit reached", 0)


def test_the_same_model_gives_the_same_counts() -> None:
    first, second = (search(QUICK["cut subscriptions"]) for _ in range(2))
    assert (first.states, first.moves, first.schedules) == (second.states, second.moves, second.schedules)


def test_the_command_prints_a_table_and_tells_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main(["--quick", "cut"]) == 0
    assert "1 of 1 models complete" in capsys.readouterr().out
    assert explore.main(["--quick", "--most-states", "10", "cut"]) == 1
    assert "limit reached" in capsys.readouterr().out


def test_calls_that_differ_in_a_keyword_alone_are_not_alike() -> None:
    def written(value: object) -> list[object]:
        writer = fingerprint._Writer()
        writer.write(value)
        return writer.written

    assert written(partial(print, sep="")) != written(partial(print, sep="x"))
    assert written(partial(print, sep="x")) == written(partial(print, sep="x"))
