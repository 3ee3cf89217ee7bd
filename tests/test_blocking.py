"""The short way of the blocking colour, in every interleaving of small models; what is broken in it is caught; and what
it asks of a server."""

import sys
import threading
from collections.abc import Coroutine
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import lockfast
from lockfast.core import express
from lockfast.core.acquire import Attempt, Grant
from lockfast.core.deadline import Deadline
from lockfast.core.first import First
from lockfast.core.local_handoff import Asked
from lockfast.core.local_queue import ClaimTerms, Lead, Passing
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.runtime.runner import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.values import Answer, Claim, Granted
from tests.explore.mutation import python
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from verify import thread_models as blocking
from verify.explorer import Explorer

MODELS = {model.name: model for model in blocking.full()}
QUICK = [model.name for model in blocking.quick()]
WISH = ClaimTerms("door", 3.0, "")


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the short way gave each time."""
    seen: list[object] = []
    shipped = express.acquire

    def noted(*args: Any) -> Any:
        outcome = shipped(*args)
        seen.append(type(outcome[0]))
        return outcome

    monkeypatch.setattr(express, "acquire", noted)
    return seen


@pytest.mark.parametrize("name", QUICK)
def test_the_short_way_keeps_the_rules_in_every_interleaving(name: str, ways: list[object]) -> None:
    report = Explorer(MODELS[name]).run(most_seconds=100.0)
    assert report.violation is None, str(report.story)
    assert report.complete
    assert {Grant, Asked} <= set(ways)


MUTANTS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "a grant counts from its answer": (
        (express, "acquire", "valid_until(asked_at, ttl)", "valid_until(runtime.now(), ttl)"),
        "threads: stopped",
        "SG",
    ),
    "a grant that has run out is handed out": (
        (express, "acquire", "if runtime.now() < until:", "if True:"),
        "threads: stopped",
        "AL",
    ),
    "who is interrupted leaves what it asked for": (
        (express, "acquire", "except BaseException as error:", "except Exception as error:"),
        "threads: interrupted",
        "CL",
    ),
    "who is interrupted in giving back leaves its grant": (
        (express, "release", "except BaseException as error:", "except Exception as error:"),
        "threads: left behind",
        "CF",
    ),
    "what is given back is still believed in": (
        (express, "release", "not holding.give_back()", "False"),
        "threads: mutex",
        "SG",
    ),
    "no answer to a release is a no": (
        (First, "answer", "await cast(Awaitable[T], outcome)", "bool(outcome.close())"),
        "threads: lost reply",
        "RL",
    ),
    "no answer to a release is a yes": (
        (
            express,
            "release",
            "if released is not True:",
            "if not released or (released is not True and released.close()):",
        ),
        "threads: left behind",
        "CF",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_is_found(name: str) -> None:
    change, model, rule = MUTANTS[name]
    with python(*change):
        report = Explorer(MODELS[model]).run(most_seconds=100.0)
    assert report.violation is not None
    assert report.violation.rule == rule


class Unasked:
    """`ports.Direct` that nobody is to use."""

    def request(self, claim: Claim, now: float, until: float) -> None:
        raise AssertionError("the store was asked")

    def answer(self, sent: None, claim: Claim, until: float) -> int | Coroutine[Any, Any, Answer]:
        raise AssertionError("the store was asked")

    def release(self, name: str, holder: str, now: float, until: float) -> bool:
        raise AssertionError("the store was asked")


def test_who_has_company_asks_for_a_tenancy_instead() -> None:
    runtime = ThreadRuntime()
    local_queue = Passing(runtime).local_queue("door")
    local_queue.askers["another"] = None
    begun, made = express.acquire(local_queue, Unasked(), runtime, WISH, 5.0, lambda: "made")
    assert isinstance(begun, Lead)
    assert made is None


def test_a_silent_store_is_not_borne_for_longer_because_of_the_short_way() -> None:
    """The first request got no answer for all the time there is, so no other is sent."""
    clean_ups: list[str] = []

    def spawn(work: Any, name: str) -> bool:
        clean_ups.append(name)
        return True

    runtime: Any = SimpleNamespace(now=lambda: 110.0, random=lambda: 0.5, spawn=spawn)
    store: Any = SimpleNamespace(listening=False)
    claim = Claim("door", "A1", 3.0, "")
    first: First[Answer] = First(100.0, StoreUnavailable("No answer.", outcome=Outcome.UNKNOWN))
    with pytest.raises(StoreUnavailable, match="No answer"):
        run(Attempt(store, runtime, claim, Deadline(None, 10.0), True, first=first).run())
    assert clean_ups == ["clean-up"]


def test_a_grant_of_the_first_request_is_taken_before_anybody_listens() -> None:
    """While a mailbox is opened, much may happen, and the grant would be left behind."""
    runtime: Any = SimpleNamespace(now=lambda: 100.0)
    store: Any = SimpleNamespace(listening=True)
    first: First[Answer] = First(100.0, Granted(7))
    grant = run(Attempt(store, runtime, Claim("door", "A1", 3.0, ""), Deadline(None, 10.0), True, first=first).run())
    assert grant is not None
    assert grant.fence == 7


# What it asks of a server.


def test_only_who_had_to_wait_asks_for_a_place_with_its_first_request(valkey: Server, proxy: FaultProxy) -> None:
    """So a lock that is free costs two requests, and one that is taken no more than it must, but for the first time."""
    counted = []
    with lockfast.connect(proxy.url) as ours, lockfast.connect(valkey.url) as others:
        lock, other = ours.lock("door"), others.lock("door")
        with lock:  # the scripts are loaded
            pass
        for taken in (False, True, True, False, False):
            lease = other.acquire() if taken else None
            before = len(proxy.requests)
            got: list[lockfast.Lease | None] = []
            thread = threading.Thread(target=lambda got=got: got.append(lock.acquire()))
            thread.start()
            if lease is not None:
                until(lambda: valkey.raw("ZCARD", "lockfast:{door}:q") == 1, "a waiter")
                lease.release()
            thread.join()
            counted.append(sum(words[0] == b"EVALSHA" for words in proxy.requests[before:]))
            assert got[0] is not None
            assert got[0].release()
    assert counted == [1, 2, 1, 1, 1]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th point in which a signal may be noticed: where a function begins, and after
    one that is written in C. Not inside the runtime, the connection and the rules of rooms: only on the way there."""

    FILES = tuple(f"/{name}.py" for name in ("express", "holding", "keep", "leases", "locking", "locks", "direct"))

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(self.FILES):
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    @property
    def raised(self) -> bool:
        return self._left <= 0


def test_who_is_interrupted_anywhere_in_taking_the_lock_has_taken_nothing(valkey: Server) -> None:
    points = 0
    with lockfast.connect(valkey.url) as locks:
        lock = locks.lock("door")
        with lock:  # connected, and the keeper runs
            pass
        while True:
            points += 1
            interrupt = Interrupt(points)
            try:
                sys.setprofile(interrupt)
                lock.__enter__()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            if not interrupt.raised:
                break
            left = (
                valkey.raw("EXISTS", "door"),
                lock._local_queue and lock._local_queue.askers,
                locks.keepalive.held(),
                lock._blocks,
            )
            assert left == (0, {}, [], []), f"point {points}"
        lock.__exit__(None, None, None)
    assert points > 15
