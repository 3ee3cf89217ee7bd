"""The embedded store: locks between the processes of one user on one machine, in an SQLite file.

- `store.py`: the port: one statement for the common case, else one transaction
- `rules.py`: what a transaction does to a lock and its queue; statements.sql and schema.sql are its words
- `database.py`: one connection, asked again while the file is busy; opening.py, faults.py, forks.py,
  checkpoint.py help it
- `inbox.py`: how a waiter hears of its grant; leading.py on threads, looping.py on asyncio, pipe.py below both
- `quick.py`: the common case alone, for commands that are over before all this is loaded
- `folder.py`: where the file may lie and who may touch it; checks.py, mounts.py, boot.py
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lockfast.stores.sqlite.folder import default_path
    from lockfast.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "default_path"]


def __getattr__(name: str) -> object:
    """Load the store when it is asked for: `quick.py` does without it."""
    if name == "SqliteStore":
        from lockfast.stores.sqlite.store import SqliteStore

        return SqliteStore
    if name == "default_path":
        from lockfast.stores.sqlite.folder import default_path

        return default_path
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
