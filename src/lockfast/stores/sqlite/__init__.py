"""The embedded store: locks between the processes of one user on one machine, in an SQLite file.

- `store.py`: the port, and a connection shared by a client; retries, checkpoints, forks, errors
- `transactions.py`: the rules for a lock and its queue
- `connection.py`: opening the file, the SQL of statements.sql and schema.sql, and the fast path of `lockfast run`
- `inbox.py`: how waiters receive notifications, through named pipes
- `location.py`: which file, which file system and which boot are safe to use
"""
