"""The Redis and Valkey store. Start with `lua/_layout.lua` (the keys on the server) and `store.py`.

redis-py connects, negotiates TLS, authenticates and finds masters (`factory.py`, `user_client.py`). Then lockfast uses
the socket itself (`transport/`), because a lock needs what a general client does not offer: requests of many threads or
tasks in order on one connection, so that a clean-up never overtakes its request; timeouts that keep the connection;
and little CPU.
"""
