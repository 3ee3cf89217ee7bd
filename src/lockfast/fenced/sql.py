"""Rows of SQLite or PostgreSQL that refuse late writers, through any DB-API connection or SQLAlchemy.

- `Guard`: a table with one row per resource and the greatest fence seen. Call `check` first in the transaction that
  writes: all its writes, in any table, are then committed under that fence or not at all.
- `update_row`: the fence is a column of the protected row; one UPDATE checks and writes.

Rules:

- The transaction is the caller's: nothing is committed or rolled back here. After `StaleFence`, roll it back.
- `check` locks the guard's row (in SQLite the file) until the transaction ends, so it still holds at the commit.
- Table and column names are quoted, values are parameters.

Not guaranteed: `Guard` on an autocommit connection, where check and write are two transactions. Use `update_row` there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from lockfast.errors import ConfigurationError, shown
from lockfast.fenced import Fenced, fence_of, refused

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*(\.[A-Za-z_][A-Za-z0-9_$]*)?")
_PARAMETER = re.compile(r":(\w+)")


class Guard:
    """A table with the greatest fence seen of each resource.

    >>> import sqlite3
    >>> db = sqlite3.connect(":memory:")
    >>> guard = Guard()
    >>> guard.create(db)
    >>> guard.check(db, "file:9527", 7)
    >>> guard.check(db, "file:9527", 6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lockfast.errors.StaleFence: The write to 'file:9527' was refused: it has fence 6, ...
    """

    def __init__(self, table: str = "lockfast_fence") -> None:
        self._table = _quoted(table)

    def create(self, connection: Any) -> None:
        """Create the table if it does not exist. Or add `schema` to your migrations."""
        _execute(connection, self.schema, {})

    @property
    def schema(self) -> str:
        """The statement that creates the table."""
        return f"CREATE TABLE IF NOT EXISTS {self._table} (name VARCHAR(1024) PRIMARY KEY, fence BIGINT NOT NULL)"

    def check(self, connection: Any, name: str, fence: Fenced | int) -> None:
        """Raise `StaleFence` if a greater fence was here; from now on smaller fences are refused."""
        number = fence_of(fence)
        changed = _execute(
            connection,
            f"INSERT INTO {self._table} (name, fence) VALUES (:name, :fence) "
            f"ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE {self._table}.fence <= excluded.fence",
            {"name": name, "fence": number},
        ).rowcount
        if changed == 0:
            found = _execute(connection, f"SELECT fence FROM {self._table} WHERE name = :name", {"name": name})
            raise refused(name, number, found.fetchone()[0])


Row = Mapping[str, Any]


def update_row(
    connection: Any, table: str, where: Row, values: Row, fence: Fenced | int, *, column: str = "fence"
) -> bool:
    """Update the row that `where` selects, unless its fence is greater; return False if there is no such row.

    >>> import sqlite3
    >>> db = sqlite3.connect(":memory:")
    >>> _ = db.execute("create table files (name text primary key, body text, fence bigint not null default 0)")
    >>> _ = db.execute("insert into files (name) values ('9527')")
    >>> update_row(db, "files", {"name": "9527"}, {"body": "new"}, 7)
    True
    >>> update_row(db, "files", {"name": "9527"}, {"body": "late"}, 6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lockfast.errors.StaleFence: The write to 'files' was refused: it has fence 6, ...
    """
    if not where or not values:
        raise ConfigurationError("update_row() needs at least one column in `where` and one in `values`.")
    number, guard, target = fence_of(fence), _quoted(column), _quoted(table)
    found = {f"w{at}": value for at, value in enumerate(where.values())}
    new = {f"v{at}": value for at, value in enumerate(values.values())}
    changes = ", ".join([f"{_quoted(name)} = :v{at}" for at, name in enumerate(values)] + [f"{guard} = :fence"])
    condition = " AND ".join(f"{_quoted(name)} = :w{at}" for at, name in enumerate(where))
    statement = f"UPDATE {target} SET {changes} WHERE {condition} AND {guard} <= :fence"
    if _execute(connection, statement, {**new, **found, "fence": number}).rowcount:
        return True
    row = _execute(connection, f"SELECT {guard} FROM {target} WHERE {condition}", found).fetchone()
    if row is None:
        return False
    if row[0] is None:
        raise ConfigurationError(f"The column {shown(column)} of {shown(table)} is NULL; set its default to 0.")
    raise refused(table, number, row[0])


def _quoted(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigurationError(f"The name of a table or column has letters, digits and _, not {shown(name)}.")
    return ".".join(f'"{part}"' for part in name.split("."))


def _execute(connection: Any, statement: str, values: dict[str, Any]) -> Any:
    """Run a statement with `:named` parameters; return a cursor or result with rows and a rowcount."""
    modules = [base.__module__ for base in type(connection).__mro__]
    if any(module.startswith("sqlalchemy.ext.asyncio") for module in modules):
        raise ConfigurationError(
            "This is an asyncio connection of SQLAlchemy: use await connection.run_sync(lambda sync: ...)."
        )
    if any(module.startswith("sqlalchemy.") for module in modules):
        from sqlalchemy import text

        return connection.execute(text(statement), values)
    call = _in_style(connection, statement, values)
    cursor = connection.cursor() if hasattr(connection, "cursor") else connection
    cursor.execute(*call)
    return cursor


def _in_style(connection: Any, statement: str, values: dict[str, Any]) -> tuple[str, Any]:
    """The statement and its values in the parameter style of the driver."""
    module = sys.modules.get(type(connection).__module__.partition(".")[0])
    style = getattr(module, "paramstyle", None)
    if style == "named":
        return statement, values
    if style == "pyformat":
        return _PARAMETER.sub(r"%(\1)s", statement), values
    if style not in ("qmark", "format"):
        raise ConfigurationError(
            f"Pass a connection or cursor of a DB-API driver or of SQLAlchemy, not {shown(type(connection))}."
        )
    order = [values[name] for name in _PARAMETER.findall(statement)]
    return _PARAMETER.sub("?" if style == "qmark" else "%s", statement), order
