"""From a URL, or a client of redis-py or valkey-py, to the store: how to dial is theirs, when is ours.

Rules kept here: the user's client and pool are read, never changed or drawn from; lockfast dials its own two
connections (requests, inbox) with the pool's class and settings: host, TLS, credentials, database, protocol, Sentinel.
Retries and time limits are ours, because a lock operation's budget is the caller's. No password reaches a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockfast.errors import ConfigurationError
from lockfast.facts import Topology
from lockfast.ports import MemberStore, Runtime, Store
from lockfast.stores.redis.assembly import Builder
from lockfast.stores.redis.multi_urls import cluster_address, sentinel_address
from lockfast.stores.redis.options import Choices
from lockfast.stores.redis.topology.sentinel import Sentinels, TaskSentinels, ThreadSentinels, Watcher
from lockfast.stores.redis.transport.connect import ConnectionFactory
from lockfast.stores.redis.urls import pool_of_url
from lockfast.values import clean, shown

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
NOT_OF_A_NODE = ("response_callbacks", "himport_registry", "event_dispatcher")
"""What redis-py's cluster keeps among a node's settings for itself."""

NO_CHOICES = Choices()


def store_of_url(url: str, runtime: Runtime, flavour: str, choices: Choices = NO_CHOICES) -> tuple[Store, str]:
    """The store at a URL of the Redis kind, and the URL fit to be shown."""
    builder = Builder(runtime, flavour, choices)
    kind = url.partition("://")[0].lower().partition("+")[2]
    if kind == "sentinel":
        return _store_of_sentinel_url(url, builder)
    if kind == "cluster":
        return _store_of_cluster_url(url, builder)
    _refuse_service(choices)
    return _store_of_pool(pool_of_url(url, flavour), builder)


def store_of_client(client: Any, runtime: Runtime, flavour: str, choices: Choices = NO_CHOICES) -> tuple[Store, str]:
    """The store that a user's client speaks to."""
    builder = Builder(runtime, flavour, choices)
    if hasattr(client, "master_for") and hasattr(client, "sentinels"):
        if choices.service is None:
            raise ConfigurationError(
                "A Sentinel object watches many masters: say which, connect(sentinel, service=...)."
            )
        client = client.master_for(choices.service)
        builder = Builder(runtime, flavour, choices._replace(service=None))
    _refuse_service(builder.choices)
    _refuse_unfit(client, flavour)
    if hasattr(client, "nodes_manager"):
        return _store_of_cluster_client(client, builder)
    return _store_of_pool(client.connection_pool, builder)


def node_of(target: Any, runtime: Runtime, flavour: str) -> tuple[MemberStore, str]:
    """One node of a quorum, from a URL or a client of one server."""
    from lockfast.stores.redis.topology.quorum_member import redis_member

    if isinstance(target, str):
        if "+" in target.partition("://")[0]:
            raise ConfigurationError("The nodes of a quorum are single servers, not clusters or groups with sentinels.")
        pool = pool_of_url(target, flavour)
    else:
        _refuse_unfit(target, flavour)
        if hasattr(target, "nodes_manager") or hasattr(target.connection_pool, "sentinel_manager"):
            raise ConfigurationError("The nodes of a quorum are single servers, not clusters or groups with sentinels.")
        pool = target.connection_pool
    settings = _ours(pool.connection_kwargs)
    return redis_member(_dial(pool.connection_class, settings), runtime, flavour), _address(settings)


def _refuse_service(choices: Choices) -> None:
    if choices.service is not None:
        raise ConfigurationError("service belongs to a Sentinel object; a URL names its service itself.")


def _refuse_unfit(client: Any, flavour: str) -> None:
    kind = type(client)
    if isinstance(client, list | tuple | set):
        raise ConfigurationError("A quorum is one list of URLs and clients: no set, and no lists within the list.")
    if hasattr(client, "command_stack") or "Pipeline" in kind.__name__:
        raise ConfigurationError("connect() needs a client, not a pipeline: pass the client that made it.")
    if hasattr(client, "nodes_manager"):
        given = "asyncio" if ".asyncio" in kind.__module__ else "threads"
    else:
        pool = getattr(client, "connection_pool", None)
        if pool is None or not hasattr(pool, "connection_class") or not hasattr(pool, "connection_kwargs"):
            raise ConfigurationError(
                f"connect() takes a URL or a client of redis-py or valkey-py, not {shown(kind.__name__)}."
            )
        if not getattr(pool, "is_master", True):
            raise ConfigurationError("This client speaks to replicas. Pass sentinel.master_for(...) instead.")
        given = "asyncio" if ".asyncio" in getattr(pool.connection_class, "__module__", "") else "threads"
    if given != flavour:
        use = "lockfast.aio.connect()" if given == "asyncio" else "lockfast.connect()"
        raise ConfigurationError(f"This client is made for {given}; pass it to {use} instead.")


def _ours(settings: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """A client's settings as we dial with them."""
    kept = {key: value for key, value in settings.items() if key not in NOT_FOR_US and key not in without}
    return {**kept, **OURS}


def _dial(connection_class: Callable[..., Any], settings: Mapping[str, Any]) -> ConnectionFactory:
    def dial(limit: float) -> Any:
        return connection_class(**{**settings, "socket_timeout": limit, "socket_connect_timeout": limit})

    return dial


def _store_of_pool(pool: Any, builder: Builder) -> tuple[Store, str]:
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None:
        watchers = [
            Watcher(one.connection_pool.connection_class, _ours(one.connection_pool.connection_kwargs))
            for one in manager.sentinels
        ]
        sentinels = _sentinels(
            builder,
            pool.service_name,
            watchers,
            others=getattr(manager, "min_other_sentinels", 0),
            master_ip=getattr(manager, "_force_master_ip", None),
        )
        settings = _ours(pool.connection_kwargs, "connection_pool")
        return _sentinel_store(sentinels, pool.connection_class, settings, builder)
    settings = _ours(pool.connection_kwargs)
    wire, inbox = builder.connections(_dial(pool.connection_class, settings))
    return builder.with_or_without_scripts(wire, inbox, Topology.SINGLE), _address(settings)


def _sentinels(builder: Builder, service: str, watchers: list[Watcher], **rules: Any) -> Sentinels:
    return (ThreadSentinels if builder.flavour == "threads" else TaskSentinels)(service, watchers, **rules)


def _sentinel_store(
    sentinels: Sentinels, connection_class: Callable[..., Any], settings: dict[str, Any], builder: Builder
) -> tuple[Store, str]:
    dial = _dial(connection_class, {**settings, "connection_pool": sentinels})
    wire, inbox = builder.connections(dial, longest=builder.longest)

    def switch() -> None:
        wire.drop()
        inbox.drop()

    sentinels.on_switch = switch
    address = clean(f"sentinel service {sentinels.service_name}, database {settings.get('db') or 0}")
    return builder.with_or_without_scripts(wire, inbox, Topology.SENTINEL), address


def _store_of_sentinel_url(url: str, builder: Builder) -> tuple[Store, str]:
    _refuse_service(builder.choices)
    found = sentinel_address(url)
    pool = pool_of_url(found.plain, builder.flavour)
    if builder.flavour == "threads":
        from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection
    else:
        from redis.asyncio.sentinel import (  # type: ignore[assignment]
            SentinelManagedConnection,
            SentinelManagedSSLConnection,
        )
    tls = "SSL" in pool.connection_class.__name__
    settings = _ours(pool.connection_kwargs, "host", "port")
    own = {key: value for key, value in settings.items() if key not in ("username", "password", "db")}
    credentials = {"username": found.sentinel_username, "password": found.sentinel_password}
    watchers = [
        Watcher(pool.connection_class, {**own, **credentials, "host": host, "port": port}) for host, port in found.hosts
    ]
    managed = SentinelManagedSSLConnection if tls else SentinelManagedConnection
    return _sentinel_store(_sentinels(builder, found.service, watchers), managed, settings, builder)


def _store_of_cluster_url(url: str, builder: Builder) -> tuple[Store, str]:
    _refuse_service(builder.choices)
    found = cluster_address(url)
    pool = pool_of_url(found.plain, builder.flavour)
    return _cluster_store(found.hosts, pool.connection_class, pool.connection_kwargs, builder)


def _store_of_cluster_client(client: Any, builder: Builder) -> tuple[Store, str]:
    seeds = tuple((node.host, node.port) for node in client.nodes_manager.startup_nodes.values())
    if builder.flavour == "asyncio":
        node = next(iter(client.nodes_manager.startup_nodes.values()))
        return _cluster_store(seeds, node.connection_class, node.connection_kwargs, builder)
    pool = client.get_redis_connection(client.get_default_node()).connection_pool
    return _cluster_store(seeds, pool.connection_class, pool.connection_kwargs, builder)


def _cluster_store(
    seeds: tuple[tuple[str, int], ...],
    connection_class: Callable[..., Any],
    settings: Mapping[str, Any],
    builder: Builder,
) -> tuple[Store, str]:
    from lockfast.stores.redis.topology.cluster import ClusterStore
    from lockfast.stores.redis.topology.cluster_node import Node

    if builder.choices.scripts is False:
        raise ConfigurationError("A cluster needs scripts: leave scripts=False out.")
    ours = _ours(settings, "host", "port", *NOT_OF_A_NODE)

    def node(host: str, port: int) -> Node:
        dial = _dial(connection_class, {**ours, "host": host, "port": port})
        wire, inbox = builder.connections(dial, longest=builder.longest, sharded=True)
        return Node(builder.store(wire, inbox, Topology.CLUSTER), wire, inbox, host)

    shown_as = ",".join(f"{host}:{port}" for host, port in seeds)
    return ClusterStore(seeds, node, builder.runtime), clean(f"redis+cluster://{shown_as}")


def _address(settings: dict[str, Any]) -> str:
    """Where that is, without credentials."""
    database = settings.get("db") or 0
    if "path" in settings:
        return clean(f"unix://{settings['path']}?db={database}")
    return clean(f"redis://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{database}")
