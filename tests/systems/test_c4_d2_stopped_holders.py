"""C4 and D2, the overrun: a holder that is stopped past its ttl and then goes on writing is refused.

A real process takes the lock, reads, and is stopped (SIGSTOP). Its ttl runs out, another gets the lock and writes. Then
the first goes on, in the middle of its work, as it would after a long pause of its machine.
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
def enqueue(
    request: pytest.FixtureRequest, tmp_path: Path, valkey: Server, postgres_url: Callable[[], str]
) -> Iterator[str]:
    """Where a resource of the kind lies, with "old" in it."""
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


def overrun(url: str, kind: str, enqueue: str) -> tuple[str, int, str]:
    """What the late writer said, the fence of the holder after it, and what is there in the end."""
    resource = {**FENCED, **UNGUARDED}[kind](enqueue)
    with lockfast.connect(url) as locks, Program("read_and_write", url, kind, enqueue, TTL) as late:
        assert late.line() == "read old"
        late.freeze()
        with locks.lock("file:9527", timeout=10) as lease:
            assert resource.read(lease.fence) == "old"
            resource.write(lease.fence, "new")
            late.tell()
            late.thaw()
            said = late.line()
        return said, lease.fence, resource.read(lease.fence)


@pytest.mark.parametrize(("kind", "place"), [("plain file", "plain file")], indirect=["place"], ids=["plain file"])
def test_c4_without_a_fence_the_late_write_wins(kind: str, enqueue: str, valkey: Server) -> None:
    """What all of this is for: the lock alone cannot stop it."""
    said, _, left = overrun(valkey.url, kind, enqueue)
    assert (said, left) == ("written", "old, and what came too late")


@pytest.mark.parametrize("locks_in", ["valkey9", "sqlite"])
@pytest.mark.parametrize(("kind", "place"), [("file", "file")], indirect=["place"], ids=["file"])
def test_c4_a_late_write_to_a_file_is_refused(
    kind: str, enqueue: str, locks_in: str, valkey: Server, tmp_path: Path
) -> None:
    url = valkey.url if locks_in == "valkey9" else f"sqlite:///{tmp_path}/locks/locks.db"
    said, fence, left = overrun(url, kind, enqueue)
    assert (said, left) == (f"refused True {fence}", "new")


@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, kind) for kind in FENCED if kind != "file"],
    indirect=["place"],
    ids=str,
)
def test_d2_a_late_write_is_refused(kind: str, enqueue: str, valkey: Server) -> None:
    said, fence, left = overrun(valkey.url, kind, enqueue)
    assert (said, left) == (f"refused True {fence}", "new")
