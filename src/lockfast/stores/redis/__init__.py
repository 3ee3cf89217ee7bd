"""The Redis and Valkey store. Start with `scripts/_grant.lua` (what lies in the server) and `store.py`.

The pool, TLS, credentials and Sentinel stay redis-py's: its connection classes dial and shake hands (`clients.py`).
After that lockfast speaks over the socket itself (`threads.py`, `asyncio.py`), because a lock needs what a general
client does not offer: requests of many threads or tasks in order on one connection, so that a clean-up can never
overtake the request it cleans up after; time limits that do not cost the connection; and little CPU.
"""
