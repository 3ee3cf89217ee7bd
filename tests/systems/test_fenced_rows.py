"""Rows of SQLite and PostgreSQL that refuse late writers, through DB-API and SQLAlchemy."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

import lockfast
from lockfast import StaleFence
from lockfast.fenced.sql import Guard, update_row
from tests.support.waiting import until
from tests.systems.resources import SCHEMA, postgres

pytestmark = pytest.mark.system("D2")

ENGINES = ("sqlite", "postgres")
WAYS = ("driver", "cursor", "SQLAlchemy connection", "SQLAlchemy session")


class Database(NamedTuple):
    """A database with the table `files` and the guard table; `open` starts a transaction."""

    engine: str
    open: Callable[[], Any]
    alchemy: sqlalchemy.Engine


@pytest.fixture(params=ENGINES)
def database(request: pytest.FixtureRequest, tmp_path: Path, postgres_url: Callable[[], str]) -> Iterator[Database]:
    if request.param == "sqlite":
        path = tmp_path / "data.db"
        made = Database("sqlite", lambda: sqlite3.connect(path), sqlalchemy.create_engine(f"sqlite:///{path}"))
    else:
        url = postgres_url()
        alchemy = sqlalchemy.create_engine("postgresql+psycopg://", creator=postgres(url))
        made = Database("postgres", postgres(url), alchemy)
    with made.alchemy.begin() as db:
        db.execute(sqlalchemy.text("DROP TABLE IF EXISTS files"))
        db.execute(sqlalchemy.text("DROP TABLE IF EXISTS lockfast_fence"))
        db.execute(sqlalchemy.text(SCHEMA))
        db.execute(sqlalchemy.text("INSERT INTO files (name, body) VALUES ('text', 'old')"))
        Guard().create(db)
        Guard().create(db)
    yield made
    made.alchemy.dispose()


@pytest.fixture(params=WAYS)
def open_way(request: pytest.FixtureRequest, database: Database) -> Iterator[Callable[[], Any]]:
    """Opens connections or cursors, each with its own transaction that is rolled back at the end."""
    opened: list[Any] = []

    def connection() -> Any:
        if request.param == "SQLAlchemy connection":
            opened.append(database.alchemy.connect())
        elif request.param == "SQLAlchemy session":
            opened.append(Session(database.alchemy))
        else:
            opened.append(database.open())
        return opened[-1].cursor() if request.param == "cursor" else opened[-1]

    yield connection
    for one in opened:
        one.rollback()
        one.close()


def body(database: Database) -> str:
    with database.alchemy.connect() as db:
        return str(db.execute(sqlalchemy.text("SELECT body FROM files WHERE name = 'text'")).scalar_one())


def test_guard_table_refuses_a_smaller_fence(open_way: Callable[[], Any]) -> None:
    db, guard = open_way(), Guard()
    for fence in (7, 7, 8):
        guard.check(db, "text", fence)
    with pytest.raises(StaleFence, match="fence 7, but fence 8 was here before") as caught:
        guard.check(db, "text", 7)
    assert (caught.value.name, caught.value.fence, caught.value.newest) == ("text", 7, 8)
    guard.check(db, "another", 1)


def test_fence_column_refuses_a_smaller_fence(open_way: Callable[[], Any]) -> None:
    db = open_way()
    assert update_row(db, "files", {"name": "text"}, {"body": "new"}, 8) is True
    assert update_row(db, "files", {"name": "text", "fence": 8}, {"body": "newer"}, 8) is True
    with pytest.raises(StaleFence):
        update_row(db, "files", {"name": "text"}, {"body": "late"}, 7)
    assert update_row(db, "files", {"name": "missing"}, {"body": "new"}, 9) is False


def test_rollback_undoes_the_fence(database: Database) -> None:
    """The transaction is the caller's, and the fence is part of it."""
    with database.alchemy.connect() as db:
        Guard().check(db, "text", 8)
        update_row(db, "files", {"name": "text"}, {"body": "new"}, 8)
        db.rollback()
        Guard().check(db, "text", 7)
        assert update_row(db, "files", {"name": "text"}, {"body": "old enough"}, 7)
        db.commit()
    assert body(database) == "old enough"


def test_large_fences_are_exact(database: Database) -> None:
    with database.alchemy.begin() as db:
        Guard().check(db, "text", 2**53 - 1)
        with pytest.raises(StaleFence):
            Guard().check(db, "text", 2**53 - 2)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_check_holds_until_the_commit(database: Database) -> None:
    """If an older holder checks first, a newer one passes the check only after the older one's commit."""
    older = database.open()
    Guard().check(older, "text", 7)
    seen: list[str] = []

    def newer() -> None:
        with database.open() as db:
            seen.append("checks")
            Guard().check(db, "text", 8)
            seen.append(db.execute("SELECT body FROM files WHERE name = 'text'").fetchone()[0])

    thread = threading.Thread(target=newer)
    thread.start()
    until(lambda: seen and waits_for_a_lock(database), "the newer holder to wait")
    older.execute("UPDATE files SET body = 'by 7' WHERE name = 'text'")
    older.commit()
    thread.join(10)
    assert seen == ["checks", "by 7"]
    with pytest.raises(StaleFence):
        Guard().check(older, "text", 7)
    older.close()


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_older_fence_is_refused_while_a_newer_writes(database: Database) -> None:
    newer = database.open()
    Guard().check(newer, "text", 8)
    refused: list[bool] = []

    def older() -> None:
        with database.open() as db:
            try:
                Guard().check(db, "text", 7)
            except StaleFence:
                refused.append(True)

    thread = threading.Thread(target=older)
    thread.start()
    until(lambda: waits_for_a_lock(database), "the older holder to wait")
    newer.commit()
    thread.join(10)
    newer.close()
    assert refused == [True]


def waits_for_a_lock(database: Database) -> bool:
    with database.open() as db:
        waiting = db.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()[0]
    return bool(waiting)


@pytest.mark.parametrize("bad", ["", "files; drop table files", 'a"b', "a.b.c", "1st", None], ids=repr)
def test_invalid_table_names_are_rejected(bad: Any) -> None:
    with pytest.raises(lockfast.ConfigurationError, match="name of a table or column"):
        Guard(bad)


def test_invalid_connections_are_rejected() -> None:
    with pytest.raises(lockfast.ConfigurationError, match="connection or cursor of a DB-API driver"):
        Guard().check(object(), "text", 7)


def test_update_without_conditions_is_rejected(database: Database) -> None:
    with database.alchemy.connect() as db, pytest.raises(lockfast.ConfigurationError, match="at least one column"):
        update_row(db, "files", {}, {"body": "everything"}, 7)


def test_null_fence_is_an_error(database: Database) -> None:
    with database.alchemy.connect() as db:
        db.execute(sqlalchemy.text("CREATE TABLE loose (name VARCHAR(9), fence BIGINT)"))
        db.execute(sqlalchemy.text("INSERT INTO loose VALUES ('text', NULL)"))
        with pytest.raises(lockfast.ConfigurationError, match="is NULL"):
            update_row(db, "loose", {"name": "text"}, {"name": "new"}, 7)
        db.rollback()


def test_asyncio_connection_error_names_run_sync() -> None:
    kind = type("AsyncConnection", (), {"__module__": "sqlalchemy.ext.asyncio.engine"})
    with pytest.raises(lockfast.ConfigurationError, match="run_sync"):
        Guard().check(kind(), "text", 7)
