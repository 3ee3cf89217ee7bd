"""The embedded store: locks between the processes of one user on one machine, in an SQLite file.

- `store.py`: the port: one statement for the common case, else one transaction
- `rules.py`: what a transaction does to a lock and its queue; statements.sql and schema.sql are its words
- `database.py`: one connection, asked again while the file is busy; opening.py, faults.py, forks.py,
  checkpoint.py help it
- `inbox.py`: how a waiter hears of its grant; leading.py on threads, looping.py on asyncio, pipe.py below both
- `folder.py`: where the file may lie and who may touch it; mounts.py, boot.py
"""

from holdfast.stores.sqlite.folder import default_path
from holdfast.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "default_path"]
