"""A cluster: keys in one slot, requests that follow a moving slot, notifications within the shard."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lockfast import State, StoreError, StoreProtocolError
from lockfast.stores.redis.keys import keys_of, slot
from lockfast.stores.redis.protocol.notifications import shard_channel
from tests.conftest import require
from tests.contract.driver import FLAVOURS, Driver, done
from tests.support.topologies import Cluster, ClusterNode, Group, migrate
from tests.topology.conftest import driver
from tests.topology.load import Workload

PAGE = (Path(__file__).parents[2] / "docs" / "permissions.md").read_text()


@pytest.fixture
def shared(shared_group: Callable[[str], Group]) -> Cluster:
    """A cluster that tests must leave healthy."""
    group = shared_group("cluster")
    assert isinstance(group, Cluster)
    return group


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(alphabet="ab{}:é ", min_size=1, max_size=12))
@example(name="{")
@example(name="}")
@example(name="{}")
@example(name="{}{a}")
@example(name="a}b")
@example(name="a}{b}")
@example(name="{a}{b}")
@example(name="{{a}}")
def test_all_keys_of_a_lock_are_in_one_slot(shared: Cluster, name: str) -> None:
    keys = keys_of(name)
    channel = shard_channel(keys.slot, "lockfast:inbox:x").encode()
    node = shared.nodes[0]
    slots = {node.raw("CLUSTER", "KEYSLOT", key) for key in (keys.lock, keys.meta, keys.queue, keys.waiters, channel)}
    assert slots == {keys.slot} == {slot(name.encode())}


@pytest.mark.parametrize("name", ["{", "}", "{}", "a}b", "a}{b}", "{a}{b}", "{{a}}", "a b"])
def test_names_with_braces_can_be_locked(shared: Cluster, flavour: str, name: str) -> None:
    d = driver(flavour, shared)

    async def play() -> None:
        lease = await done(d.lock(name).acquire(timeout=5))
        waiter = d.start(_acquire, d.lock(name))
        await d.queue_length(d.lock(name), 1)
        await done(lease.release())
        assert (await waiter.result()).fence > lease.fence

    d.run(play())


async def _acquire(lock: Any, timeout: float = 20.0) -> Any:
    return await done(lock.acquire(timeout=timeout))


def clients(group: Cluster, flavour: str) -> Any:
    library = redis if flavour == "threads" else redis.asyncio
    return library.RedisCluster(host="127.0.0.1", port=group.nodes[0].port)


def test_cluster_client_of_redis_py(shared: Cluster, flavour: str) -> None:
    d = FLAVOURS[flavour]("cluster", shared.url)

    async def play() -> None:
        client = clients(shared, flavour)
        locks = d.open(client)
        leases = [await done(locks.lock(f"thing:{number}").acquire(timeout=5)) for number in range(8)]
        assert {await done(lease.release()) for lease in leases} == {True}
        await done(locks.close())
        await done(client.aclose() if flavour == "asyncio" else client.close())

    d.run(play())


def test_notifications_stay_within_the_shard(shared: Cluster, flavour: str) -> None:
    """The release notifies the waiter with SPUBLISH, on the lock's node."""
    d = driver(flavour, shared)

    async def play() -> None:
        lease = await done(d.lock("thing").acquire())
        waiter = d.start(_acquire, d.lock("thing"))
        await d.queue_length(d.lock("thing"), 1)
        node = shared.owner("thing")
        node.raw("CONFIG", "RESETSTAT")
        await done(lease.release())
        await waiter.result()
        used = node.commands_processed()
        assert used.get("spublish", 0) >= 1
        assert "publish" not in used

    d.run(play())


def test_leases_on_all_nodes_are_renewed(shared: Cluster, flavour: str) -> None:
    d = driver(flavour, shared)

    async def play() -> None:
        names = [f"thing:{number}" for number in range(40)]
        assert len({shared.owner(name) for name in names}) == 3
        leases = [await done(d.lock(name, ttl=1.5).acquire(timeout=5)) for name in names]
        ends = max(lease._core.valid_until for lease in leases)
        await d.until(lambda: all(lease._core.valid_until > ends for lease in leases), "all to be renewed")
        assert {lease.state for lease in leases} == {State.HELD}

    d.run(play())


def test_listing_covers_all_nodes(shared: Cluster, flavour: str) -> None:
    d = driver(flavour, shared)

    async def play() -> None:
        names = {f"thing:{number}" for number in range(30)}
        for name in names:
            await done(d.lock(name).acquire(timeout=5))
        facts = (await done(d.locks.guarantees())).facts
        assert (facts.topology.value, facts.replicas) == ("a cluster", 1)
        store = d.locks.session.store
        found, cursor = set(), ""
        while True:
            page = await store.listing("thing:*", cursor, d.locks.session.runtime.now() + 5)
            found |= {one.name for one in page.infos}
            cursor = page.cursor
            if not cursor:
                break
        assert found == names

    d.run(play())


def test_client_of_a_single_node_gets_an_error_that_names_the_cluster_url(shared: Cluster, flavour: str) -> None:
    elsewhere = next(node for node in shared.nodes if node is not shared.owner("thing"))
    d = FLAVOURS[flavour]("one", elsewhere.url)

    async def play() -> None:
        with pytest.raises(StoreProtocolError, match=r"redis\+cluster://"):
            await done(d.lock("thing").acquire(timeout=0))

    d.run(play())


def test_cluster_url_of_a_plain_server_is_an_error(valkey: Any, flavour: str) -> None:
    d = FLAVOURS[flavour]("one", f"redis+cluster://127.0.0.1:{valkey.port}")

    async def play() -> None:
        with pytest.raises(StoreError, match="not part of a cluster"):
            await done(d.lock("thing").acquire(timeout=0))

    d.run(play())


def nodes_of(group: Cluster, name: str) -> tuple[ClusterNode, ClusterNode]:
    """The lock's master, and another one."""
    source = group.owner(name)
    target = next(one for one in group.masters() if one is not source)
    assert isinstance(target, ClusterNode)
    return source, target


class TestMovingSlot:
    """A slot migrates key by key, with MOVED, ASK and TRYAGAIN on the way."""

    def test_moved_slot_is_followed(self, cluster: Cluster, flavour: str) -> None:
        """MOVED: renewal, release and the next acquire go to the new node."""
        d = driver(flavour, cluster)

        async def play() -> None:
            lease = await done(d.lock("thing").acquire())
            migrate(cluster.slot("thing"), *nodes_of(cluster, "thing"))
            await done(lease.renew())
            assert await done(lease.release())
            assert (await done(d.lock("thing").acquire(timeout=5))).fence > lease.fence

        d.run(play())

    def test_renewal_works_during_migration(self, cluster: Cluster, flavour: str) -> None:
        """ASK: the keys of the lease have moved, the slot has not."""
        d = driver(flavour, cluster)

        async def play() -> None:
            lease = await done(d.lock("thing", renew=False, ttl=20).acquire())
            number = str(cluster.slot("thing"))
            source, target = nodes_of(cluster, "thing")
            target.raw("CLUSTER", "SETSLOT", number, "IMPORTING", source.node_id)
            source.raw("CLUSTER", "SETSLOT", number, "MIGRATING", target.node_id)
            await done(lease.renew())
            keys = source.raw("CLUSTER", "GETKEYSINSLOT", number, "10")
            source.raw("MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", *keys)
            before = lease._core.valid_until
            await done(lease.renew())
            assert lease._core.valid_until > before
            for node in (target, source):
                node.raw("CLUSTER", "SETSLOT", number, "NODE", target.node_id)

        d.run(play())

    def test_waiters_follow_the_slot(self, cluster: Cluster, flavour: str) -> None:
        """The old node ends the subscription; the waiters subscribe at the new node before the release."""
        d = driver(flavour, cluster)

        async def play() -> None:
            lease = await done(d.lock("thing", ttl=20).acquire())
            waiters = []
            for number in range(3):
                waiters.append(d.start(_acquire_and_release, d.connect().lock("thing", ttl=20)))
                await d.queue_length(d.lock("thing"), number + 1)
            source, target = nodes_of(cluster, "thing")
            migrate(cluster.slot("thing"), source, target)
            await d.until(lambda: len(_subscribed(target, "thing")) == 3, "all waiters to subscribe at the new node")
            await done(lease.release())
            fences = [await waiter.result() for waiter in waiters]
            assert fences == sorted(fences)
            assert fences[0] > lease.fence

        d.run(play())

    def test_acquire_waits_for_the_end_of_the_migration(self, cluster: Cluster, flavour: str) -> None:
        """TRYAGAIN: only some keys of the lock have moved."""
        d = driver(flavour, cluster)

        async def play() -> None:
            number = str(cluster.slot("thing"))
            source, target = nodes_of(cluster, "thing")
            await done((await done(d.lock("thing").acquire())).release())
            target.raw("CLUSTER", "SETSLOT", number, "IMPORTING", source.node_id)
            source.raw("CLUSTER", "SETSLOT", number, "MIGRATING", target.node_id)
            taker = d.start(_acquire, d.lock("thing"))
            await d.until(lambda: _rejected(source, "TRYAGAIN"), "the request to be rejected")
            assert not taker.ended
            migrate(int(number), source, target)
            assert await taker.result() is not None

        d.run(play())

    def test_migration_under_load(self, cluster: Cluster, flavour: str) -> None:
        """The slot moves back and forth under contention, with kept leases in the same slot."""
        _migrate_under_load(cluster, driver(flavour, cluster), times=4)

    @pytest.mark.faults
    @pytest.mark.timeout(300)
    def test_many_migrations_under_load(self, cluster: Cluster, flavour: str) -> None:
        _migrate_under_load(cluster, driver(flavour, cluster), times=60)


async def _acquire_and_release(lock: Any) -> int:
    lease = await _acquire(lock)
    fence: int = lease.fence
    await done(lease.release())
    return fence


def _subscribed(node: ClusterNode, name: str) -> set[str]:
    """The inboxes of the lock's waiters that are subscribed at this node."""
    waiting = {entry.split(" ")[3] for entry in node.raw("HVALS", keys_of(name).waiters)}
    connected: list[str] = node.raw("PUBSUB", "SHARDCHANNELS", "lockfast:inbox:*")
    return waiting & set(connected)


def _rejected(node: ClusterNode, code: str) -> bool:
    return f"errorstat_{code}:" in str(node.raw("INFO", "errorstats"))


def _migrate_under_load(cluster: Cluster, d: Driver, times: int) -> None:
    async def play() -> None:
        load = Workload(d)
        await load.keep([f"{{thing}}:kept:{number}" for number in range(5)])
        await load.contend(["thing", "{thing}:too", "elsewhere"], each=2)
        await load.until_busy(5)
        for _ in range(times):
            mover = threading.Thread(target=migrate, args=(cluster.slot("thing"), *nodes_of(cluster, "thing")))
            mover.start()
            await d.until(lambda one=mover: not one.is_alive(), "the slot to move", 20)  # type: ignore[misc]
            await load.until_busy(5, since=time.monotonic())
        assert await load.check_kept() == (5, 0)
        await load.finish()

    d.run(play())


@pytest.fixture(scope="module")
def old_cluster() -> Iterator[Cluster]:
    """Redis 6.2, which has no sharded channels."""
    require("redis62")
    with Cluster(2, replicated=False, kind="redis62") as group:
        yield group


def test_cluster_without_sharded_channels(old_cluster: Cluster, flavour: str) -> None:
    d = driver(flavour, old_cluster)

    async def play() -> None:
        lease = await done(d.lock("thing").acquire(timeout=5))
        waiters = [d.start(_acquire_and_release, d.lock("thing")) for _ in range(3)]
        await d.queue_length(d.lock("thing"), 3)
        node = old_cluster.owner("thing")
        await done(lease.release())
        fences = [await waiter.result() for waiter in waiters]
        assert len(set(fences)) == 3
        assert node.commands_processed().get("publish", 0) >= 3

    d.run(play())


def test_documented_permissions_suffice_in_a_cluster(cluster: Cluster, flavour: str) -> None:
    """The line for one server plus the row for a cluster in docs/permissions.md."""
    line = next(row for row in PAGE.splitlines() if row.startswith("ACL SETUSER billing "))
    row = next(row for row in PAGE.splitlines() if row.startswith("| a cluster |"))
    more = row.split("`")[1].replace("\\|", "|").split()
    for node in cluster.nodes:
        node.raw(*line.replace("billing:*", "thing*").split(), *more)
    d = FLAVOURS[flavour]("cluster", cluster.url.replace("://", "://billing:secret@"))

    async def play() -> None:
        lease = await done(d.lock("thing", ttl=20).acquire(timeout=5))
        waiter = d.start(_acquire_and_release, d.connect().lock("thing"))
        await d.queue_length(d.lock("thing"), 1)
        migrate(cluster.slot("thing"), *nodes_of(cluster, "thing"))
        await done(lease.renew())
        await done(lease.release())
        assert await waiter.result() > lease.fence

    d.run(play())
    denied = {entry[7] for node in cluster.masters() for entry in node.raw("ACL", "LOG")}
    assert denied <= {"client|setinfo"}
