"""Shared claims on a real ZooKeeper: random histories, races, late writes and lost replies."""

import random
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

import lockfast
from lockfast import Locks, Outcome, StoreUnavailable
from lockfast.runtime.base import run
from lockfast.stores.zookeeper.nodes import lock_path
from lockfast.stores.zookeeper.store import ZooKeeperMailbox, ZooKeeperStore
from lockfast.values import Claim, Enqueue, Granted, GrantNotification, LockInfo, Mode, Queued, Renewal, Taken
from tests.support.other_servers import ZooKeeper
from tests.support.waiting import until
from tests.support.zookeeper_proxy import ZooKeeperProxy
from tests.test_etcd_claims import History
from tests.test_late_writes import Client as PlainClient
from tests.test_late_writes import run_late
from verify.mutation import python

BRIEF, LONG = 0.5, 30.0
PATIENCE = 20.0
THREADS, ROUNDS = 6, 12


def writer(name: str, holder: str, ttl: float = LONG) -> Claim:
    return Claim(name, holder, ttl, "host:1:")


def reader(name: str, holder: str, ttl: float = LONG) -> Claim:
    return Claim(name, holder, ttl, "host:1:", weight=1)


def permits(name: str, holder: str, ttl: float = LONG, weight: int = 1, limit: int = 2) -> Claim:
    return Claim(name, holder, ttl, "host:1:", weight=weight, limit=limit)


class Client:
    """The store of one session, with blocking calls."""

    def __init__(self, locks: Locks) -> None:
        self.store = cast(ZooKeeperStore, locks.session.store)
        self.now = locks.session.runtime.now
        self.new_holder = locks.session.runtime.new_holder_id

    def until(self) -> float:
        return self.now() + PATIENCE

    def acquire(self, claim: Claim) -> Any:
        return run(self.store.acquire(claim, None, self.until()))

    def mailbox(self, holder: str) -> ZooKeeperMailbox:
        return cast(ZooKeeperMailbox, self.store.mailbox(holder))

    def enqueue(self, claim: Claim, attempt: int = 1) -> ZooKeeperMailbox:
        """Return the mailbox of a claim that is queued now."""
        box = self.store.boxes.get(claim.holder) or self.mailbox(claim.holder)
        answer = run(self.store.acquire(claim, Enqueue(box.address, attempt, None), self.until()))
        assert isinstance(answer, Queued), answer
        return box

    def granted(self, box: ZooKeeperMailbox) -> GrantNotification:
        notification = run(box.wait(self.until()))
        assert isinstance(notification, GrantNotification)
        return notification

    def renew(self, claim: Claim) -> bool:
        return run(self.store.renew([Renewal(*claim[:3], shared=bool(claim.weight))], self.until()))[0]

    def release(self, claim: Claim) -> bool:
        return run(self.store.release(claim.name, claim.holder, self.until()))

    def downgrade(self, claim: Claim) -> bool:
        return run(self.store.downgrade(claim._replace(weight=1), self.until()))

    def info(self, name: str) -> LockInfo:
        return run(self.store.inspect(name, self.until()))

    def holders(self, name: str) -> list[str]:
        return [one.holder for one in self.info(name).holders]

    def nodes(self, name: str) -> list[str]:
        """The kinds of the nodes below the lock's node."""
        path = lock_path(name)
        found = run(self.store._session.request(lambda client: client.get_children_async(path), self.until()))
        return sorted(child.partition(":")[0] for child in found or [])


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeper]:
    ZooKeeper.require()
    with ZooKeeper() as server:
        yield server


@pytest.fixture
def proxy(server: ZooKeeper) -> Iterator[ZooKeeperProxy]:
    with ZooKeeperProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def slow(proxy: ZooKeeperProxy) -> Iterator[Client]:
    """The client whose write is delayed, or whose reply is lost."""
    with lockfast.connect(proxy.url) as locks:
        yield Client(locks)


@pytest.fixture
def other(server: ZooKeeper) -> Iterator[Client]:
    with lockfast.connect(server.url) as locks:
        yield Client(locks)


@pytest.fixture
def name() -> str:
    return f"shared:{uuid.uuid4()}"


class Observer:
    """Knows who is inside, and fails if they exclude each other. Everybody enters after the grant and leaves before
    the release."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._inside: dict[str, tuple[Claim, tuple[int, ...]]] = {}
        self._fences: set[int] = set()
        self.entries = 0

    def enter(self, claim: Claim, fence: int, slots: tuple[int, ...]) -> None:
        with self._mutex:
            self._inside[claim.holder] = claim, slots
            self.entries += 1
            modes = [one.mode for one, _ in self._inside.values()]
            taken = [slot for _, slots in self._inside.values() for slot in slots]
            assert len(set(modes)) == 1, "two modes at once"
            assert len(modes) == 1 or claim.mode is not Mode.EXCLUSIVE, "two writers at once"
            assert len(set(taken)) == len(taken), "a slot was given twice"
            assert len(taken) <= claim.limit, "more permits than the limit"
            assert len(slots) == (claim.weight if claim.limit else 0)
            assert fence not in self._fences, "a fence was given twice"
            self._fences.add(fence)

    def leave(self, claim: Claim) -> None:
        with self._mutex:
            del self._inside[claim.holder]


def race(server: ZooKeeper, compete: Callable[[Client, random.Random], None]) -> None:
    """Run `compete` in several threads, each with its own session."""

    def thread(seed: int) -> None:
        with lockfast.connect(server.url) as locks:
            compete(Client(locks), random.Random(seed))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(thread, range(THREADS)))


def wait_for(client: Client, claim: Claim) -> Granted | GrantNotification:
    """Acquire in the way of the core: wait in the queue, and send the claim again when there was no notification."""
    box = client.mailbox(claim.holder)
    for attempt in range(1, 200):
        answer = run(client.store.acquire(claim, Enqueue(box.address, attempt, None), client.until()))
        if isinstance(answer, Granted):
            box.close()
            return answer
        notification = run(box.wait(client.now() + 1))
        if isinstance(notification, GrantNotification):
            assert notification.attempt == attempt
            box.close()
            return notification
    raise AssertionError("never granted")


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_agree_with_the_memory_store(server: ZooKeeper, name: str, seed: int) -> None:
    with lockfast.connect(server.url) as locks:
        History(seed, PlainClient(locks), name).run(80)


SHAPES = {
    "readers and writers": ((0, 0), (1, 0), (1, 0)),
    "permits and writers": ((0, 0), (1, 3), (2, 3), (1, 3)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_claims_that_race_never_overlap(server: ZooKeeper, other: Client, name: str, shapes: Any) -> None:
    observer = Observer()

    def compete(client: Client, seeded: random.Random) -> None:
        for _ in range(ROUNDS):
            weight, limit = seeded.choice(shapes)
            claim = Claim(name, client.new_holder(), LONG, "", weight=weight, limit=limit)
            granted = wait_for(client, claim)
            observer.enter(claim, granted.fence, granted.slots)
            client.info(name)  # others have time to enter
            if not weight and shapes[1][1] == 0 and seeded.random() < 0.5:
                observer.leave(claim)
                assert client.downgrade(claim)
                observer.enter(claim._replace(weight=1), -granted.fence, ())
            observer.leave(claim)
            assert client.release(claim)

    race(server, compete)
    assert observer.entries >= THREADS * ROUNDS
    assert other.nodes(name) == []


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_tries_that_race_for_expired_grants_never_overlap(
    server: ZooKeeper, other: Client, name: str, shapes: Any
) -> None:
    """Some holders end without a release, and several clients find their grants expired at the same time."""
    observer = Observer()

    def compete(client: Client, seeded: random.Random) -> None:
        for _ in range(ROUNDS):
            crashes = seeded.random() < 0.5
            weight, limit = seeded.choice(shapes)
            ttl = 0.02 if crashes else LONG
            claim = Claim(name, client.new_holder(), ttl, "", weight=weight, limit=limit)
            while not isinstance(answer := client.acquire(claim), Granted):
                pass
            if not crashes:
                observer.enter(claim, answer.fence, answer.slots)
                client.info(name)  # others have time to enter
                observer.leave(claim)
                assert client.release(claim)

    race(server, compete)
    until(lambda: not other.info(name).locked, "the last grant to expire")
    assert isinstance(other.acquire(writer(name, "last")), Granted)
    assert other.release(writer(name, "last"))
    assert other.nodes(name) == []


def test_late_claim_for_the_last_permit(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    assert other.acquire(permits(name, "ann")).slots == (0,)

    def take_it() -> None:
        assert other.acquire(permits(name, "bob")).slots == (1,)

    answer = run_late(proxy, lock_path(name), lambda: slow.acquire(permits(name, "cy")), take_it)
    assert isinstance(answer, Taken)
    assert other.holders(name) == ["ann", "bob"]


@pytest.mark.parametrize("shared", [reader, permits])
def test_late_claim_finds_another_lock_of_that_name(
    proxy: ZooKeeperProxy, slow: Client, other: Client, name: str, shared: Any
) -> None:
    """The node of the lock was deleted and created again, and has the same version as before."""
    assert isinstance(other.acquire(shared(name, "ann")), Granted)

    def write() -> None:
        assert other.release(shared(name, "ann"))
        assert isinstance(other.acquire(writer(name, "bob")), Granted)

    answer = run_late(proxy, lock_path(name), lambda: slow.acquire(shared(name, "cy")), write)
    assert isinstance(answer, Taken)
    assert [(one.holder, one.mode) for one in other.info(name).holders] == [("bob", Mode.EXCLUSIVE)]


def test_late_reader_finds_a_writer(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    """The reader that it wanted to join has handed the lock to a writer."""
    assert isinstance(other.acquire(reader(name, "ann")), Granted)

    def hand_off() -> None:
        box = other.enqueue(writer(name, "bob"))
        assert other.release(reader(name, "ann"))
        other.granted(box)

    answer = run_late(proxy, lock_path(name), lambda: slow.acquire(reader(name, "cy")), hand_off)
    assert isinstance(answer, Taken)
    assert [(one.holder, one.mode) for one in other.info(name).holders] == [("bob", Mode.EXCLUSIVE)]


def test_late_writer_finds_a_reader_that_joined(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    """A reader that joins counts as a change of the lock, even after the reader that it joined has ended."""
    assert isinstance(other.acquire(reader(name, "ann", BRIEF)), Granted)
    assert isinstance(other.acquire(reader(name, "bob", BRIEF)), Granted)
    until(lambda: not other.info(name).locked, "the readers to expire")

    def join() -> None:
        assert isinstance(other.acquire(reader(name, "dan")), Granted)
        assert isinstance(other.acquire(reader(name, "eve")), Granted)
        assert other.release(reader(name, "dan"))

    answer = run_late(proxy, lock_path(name), lambda: slow.acquire(writer(name, "cy")), join)
    assert isinstance(answer, Taken)
    assert other.holders(name) == ["eve"]


def test_late_batch_after_another_grant(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    """The second grant of a batch must not be due to the version that another client's grant left."""
    ann, dan = permits(name, "ann", weight=2), permits(name, "dan", weight=2)
    assert isinstance(slow.acquire(ann), Granted)
    boxes = [other.enqueue(permits(name, holder)) for holder in ("bob", "cy")]

    def adopt() -> None:
        adopted = run(other.store.adopt(dan, "ann", other.until()))
        assert adopted is not None
        assert adopted.slots == (0, 1)

    assert run_late(proxy, lock_path(name), lambda: slow.release(ann), adopt) is False
    assert other.holders(name) == ["dan"]
    assert other.release(dan)
    assert [other.granted(box).slots for box in boxes] == [(0,), (1,)]


def test_late_downgrade(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    ann = writer(name, "ann", BRIEF)
    assert isinstance(slow.acquire(ann), Granted)

    def take_over() -> None:
        until(lambda: isinstance(other.acquire(writer(name, "bob")), Granted), "the grant to expire")

    assert run_late(proxy, lock_path(name), lambda: slow.downgrade(ann), take_over) is False
    assert [(one.holder, one.mode) for one in other.info(name).holders] == [("bob", Mode.EXCLUSIVE)]


def test_late_renewal_of_expired_permits(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    ann = permits(name, "ann", BRIEF, weight=2)
    assert isinstance(slow.acquire(ann), Granted)

    def take_over() -> None:
        until(lambda: isinstance(other.acquire(permits(name, "bob")), Granted), "the grant to expire")

    assert run_late(proxy, lock_path(name), lambda: slow.renew(ann), take_over) is False
    assert other.holders(name) == ["bob"]


def test_waiter_that_enqueues_during_a_release_is_served(
    proxy: ZooKeeperProxy, slow: Client, other: Client, name: str
) -> None:
    """The release did not see the ticket. It reads the queue again, because other permits are still taken."""
    assert isinstance(slow.acquire(permits(name, "ann")), Granted)
    assert isinstance(other.acquire(permits(name, "bob")), Granted)
    boxes: list[Any] = []
    release = run_late(
        proxy,
        lock_path(name),
        lambda: slow.release(permits(name, "ann")),
        lambda: boxes.append(other.enqueue(permits(name, "cy"))),
    )
    assert release is True
    assert other.granted(boxes[0]).slots == (0,)


CLAIMS = {"writer": writer, "reader": reader, "permits": permits}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_lost_reply_of_a_grant(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str, claim: Any) -> None:
    """The claim is sent again, and finds its grant with the same fence and slots."""
    ann = claim(name, "ann")
    proxy.lose_reply(lock_path(name))
    with pytest.raises(StoreUnavailable) as caught:
        slow.acquire(ann)
    assert caught.value.outcome is Outcome.UNKNOWN
    info = other.info(name)
    again = slow.acquire(ann)
    assert (again.fence, again.slots) == (info.fence, info.holders[0].slots)
    assert other.holders(name) == ["ann"]
    assert slow.release(ann)
    assert other.nodes(name) == []


def test_lost_reply_of_an_enqueue_leaves_no_second_ticket(
    proxy: ZooKeeperProxy, slow: Client, other: Client, name: str
) -> None:
    ann, bob = reader(name, "ann"), writer(name, "bob")
    assert isinstance(other.acquire(ann), Granted)
    box = slow.mailbox("bob")
    proxy.lose_reply(lock_path(name))
    with pytest.raises(StoreUnavailable):
        run(slow.store.acquire(bob, Enqueue(box.address, 1, None), slow.until()))
    assert other.nodes(name) == ["grant", "id", "waiter"]
    slow.enqueue(bob, attempt=2)
    assert other.nodes(name) == ["grant", "id", "waiter"]
    assert other.release(ann)
    assert slow.granted(box).attempt == 2
    assert slow.release(bob)
    assert other.nodes(name) == []


def test_lost_reply_of_a_downgrade(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    ann = writer(name, "ann")
    fence = slow.acquire(ann).fence
    proxy.lose_reply(lock_path(name))
    with pytest.raises(StoreUnavailable):
        slow.downgrade(ann)
    assert slow.renew(reader(name, "ann"))
    assert slow.downgrade(ann)
    assert [(one.fence, one.mode) for one in other.info(name).holders] == [(fence, Mode.READ)]


def test_missing_ticket_means_to_queue_again(other: Client, name: str) -> None:
    ann, bob = permits(name, "ann", weight=2), permits(name, "bob")
    assert isinstance(other.acquire(ann), Granted)
    box = other.enqueue(bob)
    session = other.store._session
    run(session.request(lambda client: client.delete_async(box.ticket), other.until()))
    assert run(box.wait(other.until())) is None
    other.enqueue(bob, attempt=2)
    assert other.release(ann)
    assert other.granted(box).attempt == 2


def test_second_ticket_of_a_holder_grants_nothing(other: Client, name: str) -> None:
    """A create request that was executed twice leaves a ticket behind, which must not become a second grant."""
    ann, bob = permits(name, "ann", weight=2), permits(name, "bob")
    assert isinstance(other.acquire(ann), Granted)
    box = other.enqueue(bob)
    session, path = other.store._session, box.ticket.rpartition(":")[0] + ":"
    data, _ = run(session.request(lambda client: client.get_async(box.ticket), other.until()))
    run(session.request(lambda client: client.create_async(path, data, sequence=True), other.until()))
    assert other.release(ann)
    assert other.granted(box).slots == (0,)
    assert other.holders(name) == ["bob"]
    assert other.info(name).waiting == 0
    assert other.release(bob)
    assert other.nodes(name) == []


def test_many_readers_enter_together(other: Client, name: str) -> None:
    """More than one batch, and each with its own fence. The writer behind them stays out."""
    assert isinstance(other.acquire(writer(name, "first")), Granted)
    boxes = [other.enqueue(reader(name, f"reader-{number}")) for number in range(120)]
    last = other.enqueue(writer(name, "last"))
    late = other.enqueue(reader(name, "late"))
    assert other.release(writer(name, "first"))
    info = other.info(name)
    assert [one.holder for one in info.holders] == [f"reader-{number}" for number in range(120)]
    assert [one.holder for one in info.waiters] == ["last", "late"]
    fences = [other.granted(box).fence for box in boxes]
    assert fences == sorted(set(fences))
    for number in range(120):
        assert other.release(reader(name, f"reader-{number}"))
    other.granted(last)
    assert other.holders(name) == ["last"]
    assert other.release(writer(name, "last"))
    other.granted(late)


def test_many_expired_readers_are_replaced(other: Client, name: str) -> None:
    for number in range(120):
        assert isinstance(other.acquire(reader(name, f"reader-{number}", 0.01)), Granted)
    until(lambda: isinstance(other.acquire(writer(name, "ann")), Granted), "the readers to expire")
    assert other.nodes(name) == ["grant", "id"]


def test_semaphore_and_read_write_lock_of_the_client(server: ZooKeeper, name: str) -> None:
    with lockfast.connect(server.url) as first, lockfast.connect(server.url) as second:
        with first.semaphore(name, 2) as permit, second.semaphore(name, 2) as other:
            assert {permit.slot, other.slot} == {0, 1}
            assert first.semaphore(name, 2).acquire(timeout=0) is None
        with first.rwlock(name).writer as lease:
            assert second.rwlock(name).reader.acquire(timeout=0) is None
            lease.downgrade()
            with second.rwlock(name).reader:
                pass
        with first.all_of(name, name + ":2"):
            assert second.lock(name).acquire(timeout=0) is None


Scenario = Callable[[ZooKeeperProxy, Client, Client, str], None]

MUTANTS: dict[str, tuple[str, str, str, Scenario]] = {
    "a grant ignores the grants since it was decided": (
        "_begin",
        "ANY_VERSION if joins else children.version",
        "ANY_VERSION",
        test_late_claim_for_the_last_permit,
    ),
    "a lock that was created again is taken for the old one": (
        "_begin",
        "if joins else children.ids[0]",
        "if joins else folder",
        lambda *scene: test_late_claim_finds_another_lock_of_that_name(*scene, permits),
    ),
    "a reader joins a writer": (
        "_begin",
        "kept[-1].path if joins else children.ids[0]",
        "children.ids[0]",
        test_late_reader_finds_a_writer,
    ),
    "the grants of a batch do not depend on each other": (
        "_change",
        "transaction.check(plan.new[number - 1].path, ANY_VERSION)",
        "pass",
        test_late_batch_after_another_grant,
    ),
    "an expired grant stays beside the next one": (
        "_begin",
        "*state.expired, ",
        "",
        test_late_renewal_of_expired_permits,
    ),
    "a release does not read the queue again": (
        "_end",
        "if len(state.children.grants) > 1 or",
        "if False and",
        test_waiter_that_enqueues_during_a_release_is_served,
    ),
    "the second ticket of a holder is granted": (
        "_plan",
        "waiter.holder in holders or ",
        "",
        lambda proxy, slow, other, name: test_second_ticket_of_a_holder_grants_nothing(other, name),
    ),
    "an adopted grant loses its slots": (
        "adopt",
        "await self._change(state, Plan([self._new_grant(claim, old.slots)], []), until, [old])",
        "await self._change(state, Plan([self._new_grant(claim, ())], []), until, [old])",
        test_late_batch_after_another_grant,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_planted_error_is_detected(
    proxy: ZooKeeperProxy,
    slow: Client,
    other: Client,
    name: str,
    mutant: tuple[str, str, str, Scenario],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, old, new, killed_by = mutant
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE", 3.0)
    with python(ZooKeeperStore, method, old, new), pytest.raises(AssertionError):
        killed_by(proxy, slow, other, name)
