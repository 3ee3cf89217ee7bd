"""The embedded store: locks between the processes of one user on one machine, in an SQLite file.

- `store.py`: the port; one statement on the fast path, else one transaction
- `transactions.py`: the rules for a lock and its queue
- `database.py`: a connection shared by a client; retries, checkpoints, forks, errors
- `connection.py`: opening the file, and the SQL of statements.sql and schema.sql
- `inbox.py`: how waiters receive notifications, through named pipes
- `location.py`, `boot.py`: which file, which file system and which boot are safe to use
- `fast_client.py`: the fast path alone, for `lockfast run`
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lockfast.stores.sqlite.location import default_path
    from lockfast.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "default_path"]


def __getattr__(name: str) -> object:
    """Import the store on first use: `fast_client.py` does not need it."""
    if name == "SqliteStore":
        from lockfast.stores.sqlite.store import SqliteStore

        return SqliteStore
    if name == "default_path":
        from lockfast.stores.sqlite.location import default_path

        return default_path
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
