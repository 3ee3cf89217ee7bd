"""The SQL of this store, read from `schema.sql` and `statements.sql` next to this file.

`sqlite3` keeps the compiled form of each text it has seen, so a statement is parsed once per connection.
"""

from __future__ import annotations

import os


def _text(file_name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), file_name), encoding="utf-8") as file:
        return file.read()


def _named(text: str) -> dict[str, str]:
    """Each statement under the name that its contract begins with, without comments and its semicolon."""
    found = {}
    for part in text.split("\n\n"):
        comments = [line for line in part.splitlines() if line.startswith("--")]
        body = part.strip().splitlines()[len(comments) :]
        if body:
            name = comments[0].removeprefix("-- ").partition(":")[0]
            found[name] = "\n".join(body).removesuffix(";")
    return found


def schema() -> list[str]:
    """The statements that make an empty file ours."""
    code = "\n".join(line for line in _text("schema.sql").splitlines() if not line.startswith("--"))
    return [statement.strip() for statement in code.split(";") if statement.strip()]


_statements = _named(_text("statements.sql"))

TAKE = _statements["take"]
GIVE = _statements["give"]
RENEW = _statements["renew"]
END_AT = _statements["end_at"]
READ = _statements["read"]
GRANT = _statements["grant"]
FREE = _statements["free"]
HEAD = _statements["head"]
KEEP_PLACE = _statements["keep_place"]
JOIN = _statements["join"]
LAST_TICKET = _statements["last_ticket"]
TICKET = _statements["ticket"]
MOVE_UP = _statements["move_up"]
POSITION = _statements["position"]
LEAVE = _statements["leave"]
LEAVE_ALL = _statements["leave_all"]
WAITERS = _statements["waiters"]
WAITING = _statements["waiting"]
PAGE = _statements["page"]
MOVE_ON = _statements["move_on"]
STATE = _statements["state"]
NEW_BOOT = _statements["new_boot"]
VOID_GRANTS = _statements["void_grants"]
VOID_PLACES = _statements["void_places"]
SLICE_END = _statements["slice_end"]
FORGET_WAITERS = _statements["forget_waiters"]
FORGET_LOCKS = _statements["forget_locks"]
SWEPT = _statements["swept"]
