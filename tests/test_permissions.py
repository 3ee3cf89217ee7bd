"""The permissions in `docs/permissions.md` suffice, and each of them is needed.

The ACL line is read from the page, so a wrong page fails a test.
"""

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import lockfast
from lockfast import LockError, LockInfo, StoreRefused
from tests.conftest import require
from tests.support.servers import KINDS, Server
from tests.support.waiting import until
from tests.traps.flavours import FLAVOURS, Client, Flavour
from tests.traps.observation import Stopwatch, await_nothing_left, await_queue

PAGE = (Path(__file__).parents[1] / "docs" / "permissions.md").read_text()
TTL = 2.0


def acl_rules() -> list[str]:
    """The rules of the ACL line in the page, without `ACL SETUSER` and the user name."""
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
    """The rules for lock names that start with `prefix`, except for one rule."""
    return [rule.replace("billing:", prefix) for rule in acl_rules() if rule != without]


def url_of(server: Server, user: str) -> str:
    return f"redis://{user}:secret@{server.host}:{server.port}/0"


def test_page_explains_every_rule() -> None:
    parts = {word for word in acl_rules() if word[0] in "~&+-"}
    assert parts == NEEDED | SPARE | {"-@all"}
    assert not NEEDED & SPARE


@dataclass
class Use:
    """Every operation on locks, step by step. Collects the errors."""

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
        self.share()

    def share(self) -> None:
        """Two permits of a semaphore, and a writer that becomes a reader."""
        clients = self.first, self.second
        permits = [client.locks.semaphore(f"{self.name}:gpu", 2, ttl=TTL) for client in clients]
        writer = self.first.locks.rwlock(f"{self.name}:config", ttl=TTL).writer
        leases = [self.step(partial(self.first.do, partial(one.acquire, timeout=2))) for one in (*permits, writer)]
        if leases[-1] is not None:
            self.step(lambda: self.first.do(leases[-1].downgrade))
        for lease in leases:
            if lease is not None:
                self.step(partial(self.first.release, lease))

    def queue_up(self, number: int) -> Future[Any]:
        future: Future[Any] = self.second.acquiring(self.name, timeout=2, ttl=TTL)
        if not self.errors:
            until(lambda: future.done() or self.tickets() > number, "a ticket in the queue")
        return future

    def tickets(self) -> int:
        count: int = self.server.raw("ZCARD", f"lockfast:{{{self.name}}}:q")
        return count

    def take_over(self, future: Future[Any]) -> None:
        """Get the waiter's lease, adopt it in the first client, and release it there."""
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
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


def refusals(server: Server) -> set[str]:
    """The commands and keys in the server's log of denied requests."""
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in server.raw("ACL", "LOG")]
    return {entry["object"] for entry in entries}


class TestSufficient:
    def test_every_operation_works(self, server: Server, flavour: Flavour) -> None:
        server.raw("ACL", "SETUSER", "billing", *acl_rules())
        server.raw("ACL", "LOG", "RESET")
        url = url_of(server, "billing")
        use = Use(flavour.connect(url), flavour.connect(url), server, "billing:report")
        watch = Stopwatch()
        use.run()
        assert use.errors == []
        assert use.info is not None
        assert (use.info.locked, use.info.waiting) == (True, 2)
        assert watch.seconds < watch.most(1)
        assert refusals(server) <= {"client|setinfo", "client"}  # sent by redis-py
        await_nothing_left(server, "billing:report")

    def test_silent_inbox_is_pinged(self, server: Server, flavour: Flavour, monkeypatch: pytest.MonkeyPatch) -> None:
        """Normally after ten seconds, here much sooner. A denied PING is an answer too."""
        monkeypatch.setattr("lockfast.stores.redis.transport.connect.MAX_SILENCE", 0.05)
        for number, without in enumerate((None, "+ping")):
            user, name = f"billing{number}", f"billing:report{number}"
            server.raw("ACL", "SETUSER", user, *rules_for("billing:", without))
            server.raw("ACL", "LOG", "RESET")
            server.raw("SET", name, "another client")
            client = flavour.connect(url_of(server, user))
            waiting = client.acquiring(name, ttl=0.3)
            await_queue(server, name, 1)
            ticket = server.raw("HGETALL", f"lockfast:{{{name}}}:w")
            until(lambda: server.commands_processed().get("ping", 0) > 1 or "ping" in refusals(server), "a ping")
            until(lambda: server.raw("HGETALL", f"lockfast:{{{name}}}:w")[1] != ticket[1], "a second request")  # noqa: B023
            server.raw("DEL", name)
            client.release(waiting.result(20))

    def test_other_names_are_denied(self, server: Server) -> None:
        server.raw("ACL", "SETUSER", "billing", *acl_rules())
        with lockfast.connect(url_of(server, "billing")) as locks:
            for name in ("shipping:report", "billing", "bill"):
                with pytest.raises(StoreRefused):
                    locks.lock(name).acquire(timeout=1)
        assert server.raw("DBSIZE") == 0


def test_listing_needs_scan_and_force_release_needs_nothing_more(server: Server) -> None:
    server.raw("ACL", "SETUSER", "billing", *acl_rules())
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
def collect_warnings() -> Iterator[None]:
    log = logging.getLogger("lockfast")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: WARNINGS.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@cache
def without_each(kind: str) -> dict[str, Use | BaseException]:
    """Run every operation without one of the rules, for each rule in parallel, with a user and a prefix of its own."""
    with collect_warnings(), Server(kind) as server, FLAVOURS["threads"]() as flavour:

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

        parts = sorted(NEEDED | SPARE, key=lambda part: part != "+eval")  # first, while the server has no script yet
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


class TestNecessary:
    """`without_each` also checks that no lock is left behind."""

    @pytest.mark.parametrize("part", sorted(NEEDED))
    def test_missing_permission_raises_a_clear_error(self, kind: str, part: str) -> None:
        use = without_each(kind)[part]
        assert isinstance(use, Use), use
        assert {type(error) for error in use.errors} <= {StoreRefused}
        assert all("permissions.md" in str(error) for error in use.errors)
        # A clean-up has no caller to raise to: it logs the error.
        assert use.errors or any(use.name in line and "permissions.md" in line for line in WARNINGS)

    @pytest.mark.parametrize("part", sorted(SPARE))
    def test_optional_permission_may_be_missing(self, kind: str, part: str) -> None:
        use = without_each(kind)[part]
        assert isinstance(use, Use), use
        assert use.errors == []
