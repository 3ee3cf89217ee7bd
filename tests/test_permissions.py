"""The least that an account must be given: what `docs/permissions.md` says is enough, and nothing in it is too much.

The line is read from the page, so the page cannot be wrong without a test that fails.
"""

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lockfast
from lockfast import LockError, LockInfo, StoreRefused
from tests.conftest import require
from tests.support.servers import KINDS, Server
from tests.support.waiting import until
from tests.traps.flavours import FLAVOURS, Client, Colour
from tests.traps.watching import Stopwatch, await_nothing_left, await_queue

PAGE = (Path(__file__).parents[1] / "docs" / "permissions.md").read_text()
TTL = 2.0


def the_line() -> list[str]:
    """The words of the line that the page gives, without `ACL SETUSER` and the user's name."""
    found = re.search(r"^ACL SETUSER billing (.*)$", PAGE, re.MULTILINE)
    assert found is not None
    return found[1].split()


def table(heading: str) -> set[str]:
    """The first column of the table whose second column has that heading."""
    rows = PAGE.partition(f"| part | {heading} |")[2].partition("\n\n")[0]
    return {part.replace("\\|", "|") for part in re.findall(r"^\| `([^`]+)` \|", rows, re.MULTILINE)}


NEEDED = table("why") - {"-@all"}
SPARE = table("without it")


def rules_for(prefix: str, without: str | None = None) -> list[str]:
    """The line, for locks whose names begin with `prefix`, and without one of its parts."""
    return [rule.replace("billing:", prefix) for rule in the_line() if rule != without]


def url_of(server: Server, user: str) -> str:
    return f"redis://{user}:secret@{server.host}:{server.port}/0"


def test_the_page_explains_every_part_of_its_line() -> None:
    parts = {word for word in the_line() if word[0] in "~&+-"}
    assert parts == NEEDED | SPARE | {"-@all"}
    assert not NEEDED & SPARE


@dataclass
class Use:
    """Everything that an account may want to do with locks, step by step; what was refused is kept."""

    first: Client
    second: Client
    server: Server
    name: str
    info: LockInfo | None = None
    errors: list[LockError] = field(default_factory=list)

    def step(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except LockError as error:
            self.errors.append(error)
            return None

    def run(self) -> None:
        lease = self.step(lambda: self.first.acquire(self.name, timeout=2, ttl=TTL))
        if lease is None:
            return
        assert self.step(lambda: self.second.try_acquire(self.name, ttl=TTL)) is None
        assert self.step(lambda: self.second.acquire(self.name, timeout=0.3, ttl=TTL)) is None
        self.step(lambda: self.first.renew(lease))
        waiting = [self.queue_up(number) for number in range(2)]
        self.info = self.step(lambda: self.first.inspect(self.name))
        self.step(lambda: self.first.release(lease))
        for future in waiting:
            self.take_over(future)

    def queue_up(self, number: int) -> Future[Any]:
        future: Future[Any] = self.second.acquiring(self.name, timeout=2, ttl=TTL)
        if not self.errors:
            until(lambda: future.done() or self.places() > number, "a place in the queue")
        return future

    def places(self) -> int:
        count: int = self.server.raw("ZCARD", f"lockfast:{{{self.name}}}:q")
        return count

    def take_over(self, future: Future[Any]) -> None:
        """Get what was waited for, pass it to the first client by its export, and give it back there."""
        lease = self.step(lambda: future.result(20))
        if lease is None:
            return
        text = self.step(lambda: self.second.do(lease.export))
        adopted = self.step(lambda: self.first.adopt(text)) if text else None
        if adopted is not None:
            self.step(lambda: self.first.release(adopted))


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    require(request.param)
    with Server(request.param) as server:
        yield server


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Colour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


def refusals(server: Server) -> set[str]:
    """What the server refused, by its own log."""
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in server.raw("ACL", "LOG")]
    return {entry["object"] for entry in entries}


class TestEnough:
    def test_everything_works(self, server: Server, flavour: Colour) -> None:
        server.raw("ACL", "SETUSER", "billing", *the_line())
        server.raw("ACL", "LOG", "RESET")
        url = url_of(server, "billing")
        use = Use(flavour.connect(url), flavour.connect(url), server, "billing:report")
        watch = Stopwatch()
        use.run()
        assert use.errors == []
        assert use.info is not None
        assert (use.info.locked, use.info.waiting) == (True, 2)
        assert watch.seconds < watch.most(1)
        assert refusals(server) <= {"client|setinfo", "client"}  # what redis-py says of itself
        await_nothing_left(server, "billing:report")

    def test_a_silent_inbox_is_asked_whether_it_lives(
        self, server: Server, flavour: Colour, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which it is after ten seconds, and here much sooner; a refusal is an answer too."""
        monkeypatch.setattr("lockfast.stores.redis.transport.inbox.MAX_SILENCE", 0.05)
        for number, without in enumerate((None, "+ping")):
            user, name = f"billing{number}", f"billing:report{number}"
            server.raw("ACL", "SETUSER", user, *rules_for("billing:", without))
            server.raw("ACL", "LOG", "RESET")
            server.raw("SET", name, "a stranger's")
            client = flavour.connect(url_of(server, user))
            waiting = client.acquiring(name, ttl=0.3)
            await_queue(server, name, 1)
            ticket = server.raw("HGETALL", f"lockfast:{{{name}}}:w")
            until(lambda: server.commands_processed().get("ping", 0) > 1 or "ping" in refusals(server), "a ping")
            until(lambda: server.raw("HGETALL", f"lockfast:{{{name}}}:w")[1] != ticket[1], "another request")  # noqa: B023
            server.raw("DEL", name)
            client.release(waiting.result(20))

    def test_other_keys_channels_and_commands_are_out_of_reach(self, server: Server) -> None:
        server.raw("ACL", "SETUSER", "billing", *the_line())
        with lockfast.connect(url_of(server, "billing")) as locks:
            for name in ("shipping:report", "billing", "bill"):
                with pytest.raises(StoreRefused):
                    locks.lock(name).acquire(timeout=1)
        assert server.raw("DBSIZE") == 0


def test_who_lists_needs_one_permission_more_and_who_breaks_does_not(server: Server) -> None:
    server.raw("ACL", "SETUSER", "billing", *the_line())
    with lockfast.connect(url_of(server, "billing")) as locks, lockfast.connect(server.url) as others:
        others.lock("shipping:report").acquire(timeout=0)
        locks.lock("billing:report").acquire(timeout=0)
        with pytest.raises(StoreRefused):
            list(locks.list("billing:*"))
        server.raw("ACL", "SETUSER", "billing", "+scan")
        assert [info.name for info in locks.list("billing:*")] == ["billing:report"]
        with pytest.raises(StoreRefused):
            list(locks.list())
        assert locks.lock("billing:report").force_release() is not None


WARNINGS: list[str] = []


@contextmanager
def warnings_kept() -> Iterator[None]:
    log = logging.getLogger("lockfast")
    keepalive = logging.Handler(logging.WARNING)
    keepalive.emit = lambda record: WARNINGS.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(keepalive)
    try:
        yield
    finally:
        log.removeHandler(keepalive)


@cache
def without_each(kind: str) -> dict[str, Use | BaseException]:
    """Use everything without one of the parts, for each of them: at once, each with a user and a prefix of its own."""
    with warnings_kept(), Server(kind) as server, FLAVOURS["threads"]() as flavour:

        def use_without(number: int, part: str) -> Use:
            user, prefix = f"user{number}", f"billing{number}:"
            server.raw("ACL", "SETUSER", user, *rules_for(prefix, part))
            url = url_of(server, user)
            use = Use(flavour.connect(url), flavour.connect(url), server, f"{prefix}report")
            use.run()
            await_nothing_left(server, use.name, timeout=TTL + 2)
            return use

        def outcome(future: Future[Use]) -> Use | BaseException:
            return future.exception() or future.result()

        parts = sorted(NEEDED | SPARE, key=lambda part: part != "+eval")  # while the server has no script yet
        with ThreadPoolExecutor(len(parts)) as pool:
            first = pool.submit(use_without, 0, parts[0])
            found = {parts[0]: outcome(first)}
            under_way = {part: pool.submit(use_without, number, part) for number, part in enumerate(parts) if number}
            return found | {part: outcome(future) for part, future in under_way.items()}


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    require(request.param)
    kind: str = request.param
    return kind


class TestNotTooMuch:
    """Nothing is left behind in any case: `without_each` has looked."""

    @pytest.mark.parametrize("part", sorted(NEEDED))
    def test_a_missing_permission_is_refused_clearly(self, kind: str, part: str) -> None:
        use = without_each(kind)[part]
        assert isinstance(use, Use), use
        assert {type(error) for error in use.errors} <= {StoreRefused}
        assert all("permissions.md" in str(error) for error in use.errors)
        # A clean-up has nobody to raise it to, so it says so in the log.
        assert use.errors or any(use.name in line and "permissions.md" in line for line in WARNINGS)

    @pytest.mark.parametrize("part", sorted(SPARE))
    def test_what_may_be_left_out_is_not_missed(self, kind: str, part: str) -> None:
        use = without_each(kind)[part]
        assert isinstance(use, Use), use
        assert use.errors == []
