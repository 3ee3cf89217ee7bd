"""From a URL, or a client of redis-py or valkey-py, to the store: how to dial is theirs, when is ours.

Rules kept here: the user's client and pool are read, never changed or drawn from; holdfast dials its own two
connections (requests, inbox) with the pool's class and settings: host, TLS, credentials, database, protocol, Sentinel.
Retries and time limits are ours, because a lock operation's budget is the caller's. No password reaches a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.errors import ConfigurationError, StoreError, StoreRefused, StoreUnavailable
from holdfast.ports import Runtime, Store
from holdfast.stores.redis.replies import REFUSED, code_of
from holdfast.stores.redis.urls import pool_of_url
from holdfast.values import clean, shown

Dial = Callable[[float], Any]
"""From a time limit in seconds to an unconnected connection object."""

LEAST_DIAL = 0.05
"""Seconds that dialling gets at the least, however little time the caller has."""

OURS: dict[str, Any] = {
    "retry": None,
    "retry_on_error": [],
    "retry_on_timeout": False,
    "health_check_interval": 0,
    "decode_responses": False,
}
NOT_FOR_US = (
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "orig_host_address",
    "orig_socket_timeout",
    "orig_socket_connect_timeout",
)


def store_of_url(url: str, runtime: Runtime, colour: str, scripts: bool | None = None) -> tuple[Store, str]:
    """The store at a redis://, rediss://, valkey://, valkeys:// or unix:// URL, and the URL fit to be shown."""
    return _store_of_pool(pool_of_url(url, colour), runtime, colour, scripts)


def store_of_client(client: Any, runtime: Runtime, colour: str, scripts: bool | None = None) -> tuple[Store, str]:
    """The store that a user's client speaks to."""
    _refuse_unfit(client, colour)
    return _store_of_pool(client.connection_pool, runtime, colour, scripts)


def _refuse_unfit(client: Any, colour: str) -> None:
    kind = type(client)
    if isinstance(client, list | tuple | set):
        raise ConfigurationError("A list of servers (a quorum) is not supported yet: give one URL or client.")
    if "Cluster" in kind.__name__:
        raise ConfigurationError("Cluster clients are not supported yet: give a client of one server.")
    if hasattr(client, "command_stack"):
        raise ConfigurationError("connect() needs a client, not a pipeline: pass the client that made it.")
    pool = getattr(client, "connection_pool", None)
    if pool is None or not hasattr(pool, "connection_class") or not hasattr(pool, "connection_kwargs"):
        raise ConfigurationError(
            f"connect() takes a URL or a client of redis-py or valkey-py, not {shown(kind.__name__)}."
        )
    module = getattr(pool.connection_class, "__module__", "")
    given = "asyncio" if ".asyncio" in module else "threads"
    if given != colour:
        use = "holdfast.aio.connect()" if given == "asyncio" else "holdfast.connect()"
        raise ConfigurationError(f"This client is made for {given}; pass it to {use} instead.")


def _store_of_pool(pool: Any, runtime: Runtime, colour: str, scripts: bool | None) -> tuple[Store, str]:
    from holdfast.stores.redis.choosing import store_for
    from holdfast.stores.redis.store import Inbox, RedisStore

    settings = {key: value for key, value in pool.connection_kwargs.items() if key not in NOT_FOR_US}

    def dial(limit: float) -> Any:
        limits = {"socket_timeout": limit, "socket_connect_timeout": limit}
        return pool.connection_class(**{**settings, **OURS, **limits})

    wire: Any
    inbox: Inbox
    if colour == "threads":
        from holdfast.stores.redis.threads import ThreadInbox, ThreadWire

        wire, inbox = ThreadWire(dial, runtime), ThreadInbox(dial, runtime)
    else:
        from holdfast.stores.redis.asyncio import TaskInbox, TaskWire

        wire, inbox = TaskWire(dial, runtime), TaskInbox(dial, runtime)

    def without() -> RedisStore:
        from holdfast.stores.redis.transactions import TransactionStore

        return TransactionStore(wire, runtime)

    return store_for(scripts, RedisStore(wire, inbox), without), _address(settings)


def _address(settings: dict[str, Any]) -> str:
    """Where that is, without credentials."""
    database = settings.get("db") or 0
    if "path" in settings:
        return clean(f"unix://{settings['path']}?db={database}")
    service = settings.get("connection_pool")
    if service is not None:
        return clean(f"sentinel service {getattr(service, 'service_name', '?')}")
    return clean(f"redis://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{database}")


def protocol_of(connection: Any) -> int:
    """The version of the wire format that a connection speaks: 2 or 3."""
    return 3 if str(getattr(connection, "protocol", 2)) == "3" else 2


def dialling_error(error: Exception) -> StoreError:
    """What a failed dial or handshake means; nothing was sent that concerns a lock."""
    text = clean(str(error), 200)
    code = "NOAUTH" if text.startswith("HELLO must be called") else code_of(text)
    if code in REFUSED or "Authentic" in type(error).__name__ or "invalid username-password" in text:
        reason = REFUSED.get(code, REFUSED["WRONGPASS"])
        return StoreRefused(f"The server refused the connection: {reason}. [{text}]")
    return StoreUnavailable(
        f"No connection to the server, so nothing was changed. Is it running, and is the address right? [{text}]"
    )
