"""Groups of servers: a master with replicas and sentinels, a cluster, a quorum.

Replicas run before the sentinels start, and a cluster gets its slots and epochs explicitly, so both are ready after
about two seconds instead of ten. `heal` repairs a group that lost a master.
"""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from tests.support.resp import ReplyError
from tests.support.servers import HOST, Server, _reserve_port
from tests.support.waiting import until

SERVICE = "main"
SLOTS = 16384
READY = 20.0
FAILOVER_TIMEOUT = 2.0
"""Seconds after which a sentinel considers a failover failed."""
SOON, LATE = 0.8, 15.0
"""Seconds without an answer after which a master is considered dead."""


class Sentinel(Server):
    """One sentinel that watches `SERVICE`."""

    def __init__(self, master: Server, quorum: int = 2, down_after: float = SOON) -> None:
        self._master_port = master.port
        self._quorum = quorum
        self._down_after = down_after
        super().__init__()

    def _options(self) -> Iterator[str]:
        config = self.directory / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {SERVICE} {HOST} {self._master_port} {self._quorum}\n"
            f"sentinel down-after-milliseconds {SERVICE} {round(self._down_after * 1000)}\n"
            f"sentinel failover-timeout {SERVICE} {round(FAILOVER_TIMEOUT * 1000)}\n"
        )
        yield from (str(config), "--sentinel", "--port", str(self.port), "--bind", HOST, "--dir", str(self.directory))

    def set_timeouts(self, silence: float | None = None) -> None:
        """Set the seconds after which a server is dead and a failover has failed; None restores the initial ones."""
        down_after, failover_timeout = (self._down_after, FAILOVER_TIMEOUT) if silence is None else (silence, silence)
        self.raw("SENTINEL", "SET", SERVICE, "down-after-milliseconds", str(round(down_after * 1000)))
        self.raw("SENTINEL", "SET", SERVICE, "failover-timeout", str(round(failover_timeout * 1000)))

    def status(self) -> dict[str, str]:
        """The fields of SENTINEL MASTER."""
        words = self.raw("SENTINEL", "MASTER", SERVICE)
        return dict(zip(words[::2], words[1::2], strict=True))


class Group:
    """Servers that start and end together."""

    def __init__(self) -> None:
        self.servers: list[Server] = []

    def _add(self, server: Server) -> Server:
        self.servers.append(server)
        return server

    url: str

    def start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for server in self.servers:
            server.kill()  # an orderly shutdown would wait for the other servers
            server.close()

    def clear(self) -> None:
        """Delete all keys on every master."""
        for server in self.masters():
            server.raw("FLUSHALL")

    def masters(self) -> list[Server]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def info(server: Server, section: str = "replication") -> dict[str, str]:
    try:
        text: str = server.raw("INFO", section)
    except ConnectionError:  # a sentinel that changes the role of a server closes its connections
        text = server.raw("INFO", section)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def in_step(replica: Server, master: Server) -> bool:
    """Whether the replica follows this master and has its data."""
    found = info(replica)
    return found.get("master_link_status") == "up" and found.get("master_port") == str(master.port)


class Replicated(Group):
    """A master, its replicas, and optionally sentinels."""

    def __init__(self, replicas: int = 2, sentinels: int = 0, *, down_after: float = SOON) -> None:
        super().__init__()
        quick = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        self.data = [self._add(Server(args=quick)) for _ in range(1 + replicas)]
        self.sentinels = [Sentinel(self.data[0], sentinels // 2 + 1, down_after) for _ in range(sentinels)]
        self.servers += self.sentinels

    @property
    def url(self) -> str:  # type: ignore[override]
        """The address of the sentinels, or of the master."""
        if not self.sentinels:
            return self.data[0].url
        return f"redis+sentinel://{','.join(f'{HOST}:{one.port}' for one in self.sentinels)}/{SERVICE}"

    def start(self) -> None:
        for server in self.data:
            server.start()
        for replica in self.data[1:]:
            replica.raw("REPLICAOF", HOST, str(self.data[0].port))
        self._until_in_step(self.data[0])
        for sentinel in self.sentinels:
            sentinel.start()
        if self.sentinels:
            until(self._sentinels_agree, "the sentinels to know each other", READY)

    def _until_in_step(self, master: Server) -> None:
        others = [server for server in self.data if server is not master]
        until(lambda: all(in_step(server, master) for server in others), "the replicas to be in step", READY)
        until(lambda: info(master)["connected_slaves"] == str(len(others)), "the master to know its replicas", READY)

    def _sentinels_agree(self) -> bool:
        master = self.master()
        for sentinel in self.sentinels:
            found = sentinel.status()
            wanted = {
                "flags": "master",
                "port": str(master.port),
                "num-slaves": str(len(self.data) - 1),
                "num-other-sentinels": str(len(self.sentinels) - 1),
            }
            if any(found.get(field) != value for field, value in wanted.items()):
                return False
        return True

    def _whole(self) -> bool:
        """Whether all servers follow the master that the sentinels agree on.

        Redirects the others to it, because the sentinels take long to do so. The sentinels may change the master
        meanwhile, so each call asks them again.
        """
        if len({sentinel.status()["port"] for sentinel in self.sentinels}) != 1:
            return False
        master = self.master()
        if info(master)["role"] != "master":
            master.raw("REPLICAOF", "NO", "ONE")
        astray = [server for server in self.data if server is not master and not in_step(server, master)]
        for server in astray:
            if info(server).get("master_port") != str(master.port):
                server.raw("REPLICAOF", HOST, str(master.port))
        return not astray and self._sentinels_agree()

    def _one_master(self) -> bool:
        """Whether all sentinels name the same master, and it answers; a late sentinel may still name the old one."""
        if len({sentinel.status()["port"] for sentinel in self.sentinels}) != 1:
            return False
        try:
            return info(self.master())["role"] == "master"
        except OSError:
            return False

    def master(self) -> Server:
        """The master according to the sentinels; without sentinels the first server."""
        if not self.sentinels:
            return self.data[0]
        port = int(self.sentinels[0].status()["port"])
        return next(server for server in self.data if server.port == port)

    def masters(self) -> list[Server]:
        return [self.master()]

    def replicas(self) -> list[Server]:
        master = self.master()
        return [server for server in self.data if server is not master]

    def until_failover(self, old: Server) -> Server:
        """Wait until the sentinels have promoted another master; return it."""

        def changed() -> Server | None:
            new = self.master()
            return new if new is not old and info(new)["role"] == "master" else None

        new = until(changed, "another master", READY)
        if new is None:
            raise TimeoutError("no other master")
        return new

    def steady(self) -> None:
        """Ignore short pauses until `heal`: on a busy machine even a new master may pause."""
        for sentinel in self.sentinels:
            sentinel.set_timeouts(LATE)

    def fail_over(self, old: Server) -> None:
        """Make the sentinels replace `old`, and wait until the other servers follow the new master."""
        until(self._order_failover, "a replica that can be promoted", READY)
        new = self.until_failover(old)
        others = [server for server in self.data if server not in (old, new)]
        until(lambda: all(in_step(server, new) for server in others), "the others to follow", READY)

    def _order_failover(self) -> bool:
        try:
            self.sentinels[0].raw("SENTINEL", "FAILOVER", SERVICE)
        except ReplyError as error:
            if not str(error).startswith(("NOGOODSLAVE", "INPROG")):
                raise
            return str(error).startswith("INPROG")
        return True

    def heal(self, *, clear: bool = True) -> None:
        """Start killed servers, resume stopped ones, and wait until all follow the master."""
        if not self.sentinels:
            for server in self.data:
                revive(server)
                if server is not self.data[0]:
                    server.raw("REPLICAOF", HOST, str(self.data[0].port))
            self._until_in_step(self.data[0])
        else:
            for sentinel in self.sentinels:
                sentinel.set_timeouts()
            until(self._one_master, "the sentinels to agree on a master", READY)
            for server in self.data:
                revive(server, role=self.master())
            until(self._whole, "all to follow the master", READY)
        if clear:
            self.clear()


def revive(server: Server, role: Server | None = None) -> None:
    """Resume a stopped server, or start a killed one as a replica of `role`."""
    try:
        server.resume()
        server.raw("PING")
    except (OSError, ReplyError, RuntimeError):
        server.kill()
        server.start()
        if role is not None and role is not server:
            server.raw("REPLICAOF", HOST, str(role.port))


class ClusterNode(Server):
    """One node of a cluster, with an explicit bus port, as port + 10000 may be out of range."""

    def __init__(self, kind: str = "valkey9") -> None:
        self._bus = _reserve_port()
        self.bus_port: int = self._bus.getsockname()[1]
        args = [
            *("--cluster-enabled", "yes", "--cluster-node-timeout", str(int(SOON * 1000))),
            *("--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0"),
            *("--repl-diskless-sync-delay", "0"),
        ]
        if kind != "redis62":
            args += ["--cluster-port", str(self.bus_port)]
        super().__init__(kind, args=args)
        if kind == "redis62":  # its bus port is always port + 10000, which may be out of range
            self._move_below(55536)

    def _move_below(self, limit: int) -> None:
        kept = []
        while self.port >= limit:
            kept.append(self._reservation)
            self._reservation = _reserve_port()
            self.port = self._reservation.getsockname()[1]
        for reservation in kept:
            reservation.close()
        self.bus_port = self.port + 10000
        at = self._command.index("--port") + 1
        self._command[at] = str(self.port)

    @property
    def node_id(self) -> str:
        text: str = self.raw("CLUSTER", "MYID")
        return text

    def close(self) -> None:
        super().close()
        self._bus.close()


class Cluster(Group):
    """Masters with equal shares of the slots, and optionally one replica each."""

    def __init__(
        self, masters: int = 3, *, replicated: bool = True, kind: str = "valkey9", down_after: float = SOON
    ) -> None:
        super().__init__()
        self._first = [ClusterNode(kind) for _ in range(masters)]
        self._second = [ClusterNode(kind) for _ in range(masters)] if replicated else []
        self._down_after_ms = int(down_after * 1000)
        self.nodes = [*self._first, *self._second]
        self.servers = [*self.nodes]

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"redis+cluster://{','.join(f'{HOST}:{node.port}' for node in self.nodes[:3])}"

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        share = SLOTS // len(self._first)
        for at, node in enumerate(self._first):
            last = SLOTS - 1 if node is self._first[-1] else (at + 1) * share - 1
            if node.kind == "redis62":
                node.raw("CLUSTER", "ADDSLOTS", *map(str, range(at * share, last + 1)))
            else:
                node.raw("CLUSTER", "ADDSLOTSRANGE", str(at * share), str(last))
        for epoch, node in enumerate(self.nodes):
            node.raw("CLUSTER", "SET-CONFIG-EPOCH", str(epoch + 1))
        for node in self.nodes[1:]:
            node.raw("CLUSTER", "MEET", HOST, str(self.nodes[0].port), str(self.nodes[0].bus_port))
        until(lambda: all(self._knows(node, len(self.nodes)) for node in self.nodes), "the nodes to meet", READY)
        for master, replica in zip(self._first, self._second, strict=False):
            replica.raw("CLUSTER", "REPLICATE", master.node_id)
        self.until_sound()
        for node in self.nodes:  # not earlier: it also sets the pace at which nodes discover each other
            node.raw("CONFIG", "SET", "cluster-node-timeout", str(self._down_after_ms))

    @staticmethod
    def _knows(node: Server, count: int) -> bool:
        return info_of_cluster(node).get("cluster_known_nodes") == str(count)

    def until_sound(self) -> None:
        """Wait until every node sees all slots served and every replica is in step."""

        def sound() -> bool:
            if not all(info_of_cluster(node).get("cluster_state") == "ok" for node in self.nodes):
                return False
            rows = [row for node in self.nodes for row in node.raw("CLUSTER", "SLOTS")]
            if {len(row) for row in rows} != {4 if self._second else 3}:
                return False
            replicas = [node for node in self.nodes if info(node)["role"] == "slave"]
            return len(replicas) == len(self._second) and all(
                info(node)["master_link_status"] == "up" for node in replicas
            )

        until(sound, "the cluster to be whole", READY)

    def masters(self) -> list[Server]:
        return [node for node in self.nodes if info(node)["role"] == "master"]

    def owner(self, key: str) -> ClusterNode:
        """The master of the slot of `key`, according to the first live node."""
        slot = self.slot(key)
        for node in self.nodes:
            try:
                rows = node.raw("CLUSTER", "SLOTS")
            except OSError:
                continue
            port = next((row[2][1] for row in rows if row[0] <= slot <= row[1]), None)
            found = [one for one in self.nodes if one.port == port]
            if found:
                return found[0]
        raise LookupError(f"no node serves the slot of {key!r}")

    def slot(self, key: str) -> int:
        number: int = self._alive().raw("CLUSTER", "KEYSLOT", key)
        return number

    def _alive(self) -> Server:
        for node in self.nodes:
            try:
                node.raw("PING")
            except (OSError, RuntimeError):
                continue
            return node
        raise LookupError("no node is alive")

    def heal(self, *, clear: bool = True) -> None:
        """Start killed nodes, resume stopped ones, and wait until the cluster is whole."""
        for node in self.nodes:
            revive(node)
        self.until_sound()
        if clear:
            self.clear()


class Five(Group):
    """Five independent servers; clients use them as a quorum."""

    def start(self) -> None:
        for _ in range(5):
            self._add(Server("valkey9")).start()
        self.url = [server.url for server in self.servers]  # type: ignore[assignment]

    def masters(self) -> list[Server]:
        return self.servers


GROUPS: dict[str, Callable[[], Group]] = {
    "replicated": lambda: Replicated(1),
    "sentinel": lambda: Replicated(2, 3, down_after=LATE),
    "cluster": lambda: Cluster(down_after=LATE),
    "quorum": Five,
}
"""Groups that tests share. Tests must not harm their masters; the long timeouts tolerate a busy machine."""


def info_of_cluster(node: Server) -> dict[str, str]:
    text: str = node.raw("CLUSTER", "INFO")
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def migrate(slot: int, source: ClusterNode, target: ClusterNode, *, step: Any = None) -> None:
    """Move a slot key by key, as resharding tools do; calls `step` after each batch."""
    target.raw("CLUSTER", "SETSLOT", str(slot), "IMPORTING", source.node_id)
    source.raw("CLUSTER", "SETSLOT", str(slot), "MIGRATING", target.node_id)
    while keys := source.raw("CLUSTER", "GETKEYSINSLOT", str(slot), "2"):
        source.raw("MIGRATE", HOST, str(target.port), "", "0", "5000", "KEYS", *keys)
        if step is not None:
            step()
    for node in (target, source):
        node.raw("CLUSTER", "SETSLOT", str(slot), "NODE", target.node_id)
