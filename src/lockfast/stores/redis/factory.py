"""Build a store from a URL, or from a redis-py or valkey-py client.

Rules:

- The user's client and its pool are only read. lockfast opens its own two connections (requests, inbox) with the
  pool's connection class and settings: host, TLS, credentials, database, protocol, Sentinel.
- Retries and time limits are lockfast's own, because the caller sets the time budget of a lock operation.
- No message contains a password.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lockfast.errors import ConfigurationError, shown
from lockfast.facts import Topology
from lockfast.ports import MemberStore, Runtime, Store
from lockfast.stores.redis.store import RedisMember, RedisStore
from lockfast.stores.redis.topology.replication import AcknowledgedStore, ReplicaAcks, Sentinel, Sentinels
from lockfast.stores.redis.transport.connect import ConnectionFactory
from lockfast.stores.redis.urls import Address, parse_cluster_url, parse_sentinel_url, pool_of_url
from lockfast.values import clean, seconds

OUR_SETTINGS: dict[str, Any] = {
    "retry": None,
    "retry_on_error": [],
    "retry_on_timeout": False,
    "health_check_interval": 0,
    "decode_responses": False,
}
POOL_ONLY_SETTINGS = (
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "orig_host_address",
    "orig_socket_timeout",
    "orig_socket_connect_timeout",
)
CLUSTER_ONLY_SETTINGS = ("response_callbacks", "himport_registry", "event_dispatcher")
"""Settings that redis-py's cluster client keeps among those of its nodes."""
REPLY_LIMIT = 1.0
"""Seconds to wait for a reply where another server may take over. The request is then repeated, which is safe."""
MAX_REPLICAS = 100


class RedisOptions(NamedTuple):
    """Checked options.

    `acks` is None if no acknowledgement is needed. `reassert` None: on with sentinels or a cluster only. `service` is
    the sentinels' name for the master. `scripts` None: use scripts unless the server denies them."""

    acks: ReplicaAcks | None
    reassert: bool | None
    service: str | None
    scripts: bool | None


def _checked(given: Mapping[str, Any]) -> RedisOptions:
    """Check the options, and add the defaults.

    >>> _checked({"replicas": 1}).acks
    ReplicaAcks(replicas=1, within=1.0, on_disk=False)
    >>> _checked({"replicas": -1})
    Traceback (most recent call last):
    lockfast.errors.ConfigurationError: replicas must be a whole number from 0 to 100, not -1.
    """
    replicas, on_disk = given.get("replicas", 0), given.get("aof", False)
    reassert, service, scripts = given.get("reassert"), given.get("service"), given.get("scripts")
    if type(replicas) is not int or not 0 <= replicas <= MAX_REPLICAS:
        raise ConfigurationError(f"replicas must be a whole number from 0 to {MAX_REPLICAS}, not {shown(replicas)}.")
    if not isinstance(on_disk, bool):
        raise ConfigurationError(f"aof must be True or False, not {shown(on_disk)}.")
    if reassert is not None and not isinstance(reassert, bool):
        raise ConfigurationError(f"reassert must be True, False or None, not {shown(reassert)}.")
    if service is not None and (not isinstance(service, str) or not service):
        raise ConfigurationError(f"service must be the sentinels' name for a master, not {shown(service)}.")
    if scripts is not None and not isinstance(scripts, bool):
        raise ConfigurationError(f"scripts must be True, False, or None to find out, not {shown(scripts)}.")
    if scripts is False and (replicas or on_disk or reassert):
        raise ConfigurationError("Acknowledgement by replicas and reassert need scripts: remove scripts=False.")
    within = seconds(given.get("replica_timeout", 1.0), "replica_timeout", least=0.001, most=60.0)
    if replicas or on_disk:
        return RedisOptions(ReplicaAcks(replicas, within, on_disk), reassert, service, scripts)
    if "replica_timeout" in given:
        raise ConfigurationError("replica_timeout has no effect without replicas=1 (or more) or aof=True.")
    return RedisOptions(None, reassert, service, scripts)


def store_of_url(url: str, runtime: Runtime, flavour: str, given: Mapping[str, Any]) -> tuple[Store, str]:
    """The store at a Redis URL with the options of `connect()`, and its address without credentials."""
    options = _checked(given)
    _reject_service(options)
    builder = StoreBuilder(runtime, flavour, options)
    kind = url.partition("://")[0].lower().partition("+")[2]
    if kind == "sentinel":
        return _store_of_sentinel_url(url, builder)
    if kind == "cluster":
        group = parse_cluster_url(url)
        pool = pool_of_url(group.one_server, flavour)
        return builder.cluster_store(group.hosts, pool.connection_class, pool.connection_kwargs)
    return _store_of_pool(pool_of_url(url, flavour), builder)


def store_of_client(client: Any, runtime: Runtime, flavour: str, given: Mapping[str, Any]) -> tuple[Store, str]:
    """Like `store_of_url`, for the server of the user's client."""
    options = _checked(given)
    if hasattr(client, "master_for") and hasattr(client, "sentinels"):
        if options.service is None:
            raise ConfigurationError("A Sentinel object has several masters. Name one: connect(sentinel, service=...).")
        client, options = client.master_for(options.service), options._replace(service=None)
    _reject_service(options)
    _check_client(client, flavour)
    builder = StoreBuilder(runtime, flavour, options)
    if hasattr(client, "nodes_manager"):
        nodes = list(client.nodes_manager.startup_nodes.values())
        pool = nodes[0]  # on asyncio a node has the attributes of a pool
        if flavour == "threads":
            pool = client.get_redis_connection(client.get_default_node()).connection_pool
        seeds = [(node.host, node.port) for node in nodes]
        return builder.cluster_store(seeds, pool.connection_class, pool.connection_kwargs)
    return _store_of_pool(client.connection_pool, builder)


def member_of(target: Any, runtime: Runtime, flavour: str) -> tuple[MemberStore, str]:
    """One member of a quorum, from a URL or a client of a single server."""
    if isinstance(target, str):
        several = "+" in target.partition("://")[0]
    else:
        _check_client(target, flavour)
        several = hasattr(target, "nodes_manager") or hasattr(target.connection_pool, "sentinel_manager")
    if several:
        raise ConfigurationError("The members of a quorum are single servers, not clusters and not sentinel groups.")
    pool = pool_of_url(target, flavour) if isinstance(target, str) else target.connection_pool
    settings = _our_settings(pool.connection_kwargs)
    builder = StoreBuilder(runtime, flavour, _checked({}))
    connections = builder.connections(_connection_factory(pool.connection_class, settings), member=True)
    return RedisMember(*connections), _address(settings)


class StoreBuilder(NamedTuple):
    """Builds the connections and stores of one `connect()` call."""

    runtime: Runtime
    flavour: str
    options: RedisOptions

    def connections(
        self, factory: ConnectionFactory, *, failover: bool = False, member: bool = False
    ) -> tuple[Any, Any]:
        """A wire and an inbox, not connected yet. With `failover`, a reply has limited time."""
        limit = math.inf
        if failover:  # a WAIT for replicas delays the requests behind it
            limit = REPLY_LIMIT + (min(1.0, self.options.acks.within) if self.options.acks else 0.0)
        wire_class: type[Any]
        inbox_class: type[Any]
        if self.flavour == "threads":
            from lockfast.stores.redis.transport import threads

            wire_class, inbox_class = threads.ThreadWire, threads.ThreadInbox
        else:
            from lockfast.stores.redis.transport import tasks

            wire_class, inbox_class = tasks.TaskWire, tasks.TaskInbox
        wire = wire_class(factory, self.runtime, limit, member=member)
        return wire, inbox_class(factory, self.runtime, limit, member=member)

    def store(self, wire: Any, inbox: Any, topology: Topology) -> RedisStore:
        """With scripts, with transactions, or (except in a cluster) with scripts until the server denies them."""
        acks, reassert, _, scripts = self.options
        reasserts = topology is not Topology.SINGLE if reassert is None else reassert
        if acks is not None:
            return AcknowledgedStore(wire, inbox, self.runtime, acks, topology=topology, reasserts=reasserts)
        if scripts or topology is Topology.CLUSTER:
            return RedisStore(wire, inbox, topology=topology, reasserts=reasserts)
        from lockfast.stores.redis.fallback.transactions import FallbackStore, TransactionStore

        if scripts is False:
            return TransactionStore(wire, self.runtime, topology=topology)
        return FallbackStore(wire, inbox, self.runtime, topology=topology, reasserts=reasserts)

    def cluster_store(
        self, seeds: Sequence[Address], connection_class: Callable[..., Any], settings: Mapping[str, Any]
    ) -> tuple[Store, str]:
        from lockfast.stores.redis.topology.cluster import ClusterNode, ClusterStore

        if self.options.scripts is False:
            raise ConfigurationError("A cluster needs scripts: remove scripts=False.")
        ours = _our_settings(settings, "host", "port", *CLUSTER_ONLY_SETTINGS)

        def node(host: str, port: int) -> ClusterNode:
            new_connection = _connection_factory(connection_class, {**ours, "host": host, "port": port})
            wire, inbox = self.connections(new_connection, failover=True)
            inbox.sharded = True
            return ClusterNode(self.store(wire, inbox, Topology.CLUSTER), wire, inbox, host)

        hosts = ",".join(f"{host}:{port}" for host, port in seeds)
        return ClusterStore(seeds, node, self.runtime), clean(f"redis+cluster://{hosts}")

    def sentinel_store(
        self, sentinels: Sentinels, connection_class: Callable[..., Any], settings: dict[str, Any]
    ) -> tuple[Store, str]:
        new_connection = _connection_factory(connection_class, {**settings, "connection_pool": sentinels})
        store = self.store(*self.connections(new_connection, failover=True), Topology.SENTINEL)
        sentinels.on_new_master = store.disconnect
        return store, clean(f"sentinel service {sentinels.service_name}, database {settings.get('db') or 0}")


def _store_of_pool(pool: Any, builder: StoreBuilder) -> tuple[Store, str]:
    manager = getattr(pool, "sentinel_manager", None)
    if manager is None:
        settings = _our_settings(pool.connection_kwargs)
        connections = builder.connections(_connection_factory(pool.connection_class, settings))
        return builder.store(*connections, Topology.SINGLE), _address(settings)
    pools = [sentinel.connection_pool for sentinel in manager.sentinels]
    sentinels = Sentinels(
        pool.service_name,
        [Sentinel(one.connection_class, _our_settings(one.connection_kwargs)) for one in pools],
        builder.flavour,
        min_other_sentinels=getattr(manager, "min_other_sentinels", 0),
        forced_ip=getattr(manager, "_force_master_ip", None),
    )
    settings = _our_settings(pool.connection_kwargs, "connection_pool")
    return builder.sentinel_store(sentinels, pool.connection_class, settings)


def _store_of_sentinel_url(url: str, builder: StoreBuilder) -> tuple[Store, str]:
    group = parse_sentinel_url(url)
    pool = pool_of_url(group.one_server, builder.flavour)
    if builder.flavour == "threads":
        from redis import sentinel as library
    else:
        from redis.asyncio import sentinel as library  # type: ignore[no-redef]
    tls = "SSL" in pool.connection_class.__name__
    settings = _our_settings(pool.connection_kwargs, "host", "port")
    own = {key: value for key, value in settings.items() if key not in ("username", "password", "db")}
    own |= {"username": group.sentinel_username, "password": group.sentinel_password}
    sentinels = Sentinels(
        group.service,
        [Sentinel(pool.connection_class, {**own, "host": host, "port": port}) for host, port in group.hosts],
        builder.flavour,
    )
    managed = library.SentinelManagedSSLConnection if tls else library.SentinelManagedConnection
    return builder.sentinel_store(sentinels, managed, settings)


def _reject_service(options: RedisOptions) -> None:
    if options.service is not None:
        raise ConfigurationError("service belongs to a Sentinel object. A URL contains the name of its service.")


def _check_client(client: Any, flavour: str) -> None:
    kind = type(client)
    if isinstance(client, list | tuple | set):
        raise ConfigurationError("A quorum is one list of URLs and clients, not a set and not a nested list.")
    if hasattr(client, "command_stack") or "Pipeline" in kind.__name__:
        raise ConfigurationError("connect() needs a client, not a pipeline. Pass the client that created it.")
    module = kind.__module__
    if not hasattr(client, "nodes_manager"):
        pool = getattr(client, "connection_pool", None)
        if pool is None or not hasattr(pool, "connection_class") or not hasattr(pool, "connection_kwargs"):
            found = shown(kind.__name__)
            raise ConfigurationError(f"connect() takes a URL or a client of redis-py or valkey-py, not {found}.")
        if not getattr(pool, "is_master", True):
            raise ConfigurationError("This client connects to replicas. Pass sentinel.master_for(...) instead.")
        module = getattr(pool.connection_class, "__module__", "")
    given = "asyncio" if ".asyncio" in module else "threads"
    if given != flavour:
        use = "lockfast.aio.connect()" if given == "asyncio" else "lockfast.connect()"
        raise ConfigurationError(f"This client is made for {given}. Pass it to {use} instead.")


def _our_settings(settings: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """A client's connection settings, with our own for retries and decoding."""
    kept = {key: value for key, value in settings.items() if key not in POOL_ONLY_SETTINGS and key not in without}
    return {**kept, **OUR_SETTINGS}


def _connection_factory(connection_class: Callable[..., Any], settings: Mapping[str, Any]) -> ConnectionFactory:
    def new_connection(limit: float) -> Any:
        return connection_class(**{**settings, "socket_timeout": limit, "socket_connect_timeout": limit})

    return new_connection


def _address(settings: dict[str, Any]) -> str:
    database = settings.get("db") or 0
    if "path" in settings:
        return clean(f"unix://{settings['path']}?db={database}")
    return clean(f"redis://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{database}")
