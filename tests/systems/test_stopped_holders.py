"""A holder that is stopped past its ttl and then writes is refused.

A real process acquires the lock, reads, and is stopped (SIGSTOP). Its lease expires; another client acquires the lock
and writes. Then the first process continues (SIGCONT), as after a long pause of its machine.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

import lockfast
from lockfast import fenced
from tests.support.servers import Server
from tests.systems.programs import Program
from tests.systems.resources import FENCED, SCHEMA, UNGUARDED, postgres

TTL = 0.3
OLD = "INSERT INTO files (name, body) VALUES ('text', 'old')"


@pytest.fixture
def address(
    request: pytest.FixtureRequest, tmp_path: Path, valkey: Server, postgres_url: Callable[[], str]
) -> Iterator[str]:
    """The address of a resource of this kind that contains "old"."""
    kind: str = request.param
    with ExitStack() as stack:
        if kind == "key":
            stack.enter_context(redis.Redis.from_url(valkey.url)).set("text", "old")
            yield valkey.url
        elif kind.startswith("sqlite"):
            with sqlite3.connect(tmp_path / "data.db") as db:
                db.execute(SCHEMA)
                db.execute(OLD)
                fenced.sql.Guard().create(db)
            yield str(tmp_path / "data.db")
        elif kind.startswith("postgres"):
            url = postgres_url()
            with postgres(url)() as db:
                db.execute("DROP TABLE IF EXISTS files; DROP TABLE IF EXISTS lockfast_fence")
                db.execute(SCHEMA)
                db.execute(OLD)
                fenced.sql.Guard().create(db)
            yield url
        else:
            (tmp_path / "9527.txt").write_text("old", encoding="utf-8")
            yield str(tmp_path / "9527.txt")


def overrun(url: str, kind: str, address: str) -> tuple[str, int, str]:
    """Return the late writer's output, the second holder's fence, and the final content."""
    resource = {**FENCED, **UNGUARDED}[kind](address)
    with lockfast.connect(url) as locks, Program("read_and_write", url, kind, address, TTL) as late:
        assert late.line() == "read old"
        late.freeze()
        with locks.lock("file:9527", timeout=10) as lease:
            assert resource.read(lease.fence) == "old"
            resource.write(lease.fence, "new")
            late.tell()
            late.thaw()
            said = late.line()
        return said, lease.fence, resource.read(lease.fence)


@pytest.mark.system("C4")
@pytest.mark.parametrize(("kind", "address"), [("plain file", "plain file")], indirect=["address"], ids=["plain file"])
def test_late_write_wins_without_a_fence(kind: str, address: str, valkey: Server) -> None:
    """The lock alone cannot prevent it."""
    said, _, left = overrun(valkey.url, kind, address)
    assert (said, left) == ("written", "old, and what came too late")


@pytest.mark.system("C4")
@pytest.mark.parametrize("locks_in", ["valkey9", "sqlite"])
@pytest.mark.parametrize(("kind", "address"), [("file", "file")], indirect=["address"], ids=["file"])
def test_late_write_to_a_file_is_refused(
    kind: str, address: str, locks_in: str, valkey: Server, tmp_path: Path
) -> None:
    url = valkey.url if locks_in == "valkey9" else f"sqlite:///{tmp_path}/locks/locks.db"
    said, fence, left = overrun(url, kind, address)
    assert (said, left) == (f"refused True {fence}", "new")


@pytest.mark.system("D2")
@pytest.mark.parametrize(
    ("kind", "address"),
    [(kind, kind) for kind in FENCED if kind != "file"],
    indirect=["address"],
    ids=str,
)
def test_late_write_is_refused(kind: str, address: str, valkey: Server) -> None:
    said, fence, left = overrun(valkey.url, kind, address)
    assert (said, left) == (f"refused True {fence}", "new")
