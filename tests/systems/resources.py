"""Resources that a lock protects, with one interface, so that one program can be stopped before it writes to any.

`FENCED` resources check the fence; `UNGUARDED` is a plain file.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import redis

from lockfast import fenced


class Resource(Protocol):
    """A text that is read and written with a fence."""

    def read(self, fence: int) -> str: ...

    def write(self, fence: int, text: str) -> None: ...


class GuardedFile:
    def __init__(self, location: str) -> None:
        self._path = location

    def read(self, fence: int) -> str:
        return fenced.file.FencedFile(self._path, fence).read_text()

    def write(self, fence: int, text: str) -> None:
        fenced.file.FencedFile(self._path, fence).write_text(text)


class PlainFile:
    def __init__(self, location: str) -> None:
        self._path = Path(location)

    def read(self, fence: int) -> str:
        return self._path.read_text(encoding="utf-8")

    def write(self, fence: int, text: str) -> None:
        self._path.write_text(text, encoding="utf-8")


class GuardedKey:
    def __init__(self, location: str) -> None:
        self._client = redis.Redis.from_url(location, decode_responses=True)

    def read(self, fence: int) -> str:
        return str(fenced.redis.Writer(self._client, fence).get("text"))

    def write(self, fence: int, text: str) -> None:
        fenced.redis.Writer(self._client, fence).set("text", text)


class GuardedTable:
    """A guard table: the check and the write are one transaction."""

    def __init__(self, connect: Callable[[], Any], mark: str) -> None:
        self._connect = connect
        self._mark = mark
        self._guard = fenced.sql.Guard()

    def read(self, fence: int) -> str:
        with self._connect() as db:
            self._guard.check(db, "text", fence)
            return str(db.execute("SELECT body FROM files WHERE name = 'text'").fetchone()[0])

    def write(self, fence: int, text: str) -> None:
        with self._connect() as db:
            self._guard.check(db, "text", fence)
            db.execute(f"UPDATE files SET body = {self._mark} WHERE name = 'text'", (text,))


class GuardedRow(GuardedTable):
    """A fence column, which only a write raises."""

    def read(self, fence: int) -> str:
        with self._connect() as db:
            return str(db.execute("SELECT body FROM files WHERE name = 'text'").fetchone()[0])

    def write(self, fence: int, text: str) -> None:
        with self._connect() as db:
            fenced.sql.update_row(db, "files", {"name": "text"}, {"body": text}, fence)


def postgres(location: str) -> Callable[[], Any]:
    import psycopg

    return lambda: psycopg.connect(location)


FENCED: dict[str, Callable[[str], Resource]] = {
    "file": GuardedFile,
    "key": GuardedKey,
    "sqlite table": lambda location: GuardedTable(lambda: sqlite3.connect(location), "?"),
    "sqlite row": lambda location: GuardedRow(lambda: sqlite3.connect(location), "?"),
    "postgres table": lambda location: GuardedTable(postgres(location), "%s"),
    "postgres row": lambda location: GuardedRow(postgres(location), "%s"),
}
UNGUARDED: dict[str, Callable[[str], Resource]] = {"plain file": PlainFile}
SCHEMA = "CREATE TABLE files (name VARCHAR(100) PRIMARY KEY, body TEXT NOT NULL, fence BIGINT NOT NULL DEFAULT 0)"
