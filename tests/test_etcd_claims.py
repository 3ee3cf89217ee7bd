"""Readers, permits and several locks on a real etcd: random histories, races, late writes and lost replies."""

import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

import lockfast
from lockfast import ConfigurationError, Outcome, StoreUnavailable
from lockfast.runtime.base import run
from lockfast.stores.etcd import records
from lockfast.stores.etcd.records import BATCH
from lockfast.stores.memory import Space
from lockfast.values import Claim, Enqueue, Granted, GrantNotification, LockInfo, Mode, Queued, Renewal, Taken
from tests.support.other_servers import Etcd
from tests.support.waiting import until
from tests.test_late_writes import Client, EtcdDelay, run_late
from tests.traps.observation import Stopwatch

LONG = 60.0
LIMIT = 3
SHAPES = {"write": (0, 0), "read": (1, 0), "one": (1, LIMIT), "two": (2, LIMIT), "three": (3, LIMIT)}
HOLDERS = ("ann", "bob", "cy", "dan", "eve", "fay")


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    Etcd.require()
    with Etcd() as server:
        yield server


@pytest.fixture
def first(server: Etcd) -> Iterator[Client]:
    with lockfast.connect(server.url) as locks:
        yield Client(locks)


@pytest.fixture
def second(server: Etcd) -> Iterator[Client]:
    with lockfast.connect(server.url) as locks:
        yield Client(locks)


@pytest.fixture
def name() -> str:
    return f"claims:{uuid.uuid4()}"


def claim(name: str, holder: str, shape: str, ttl: float = LONG) -> Claim:
    """A claim of that shape. Holder ids are those of one claim, so they include the name."""
    weight, limit = SHAPES[shape]
    return Claim(name, f"{holder}.{name}", ttl, "host:1:", weight=weight, limit=limit)


def enqueue(client: Client, wanted: Claim, attempt: int = 1) -> Any:
    """Send a claim with a mailbox; return both the mailbox and the answer."""
    box = client.store.mailbox(wanted.holder)
    return box, run(client.store.acquire(wanted, Enqueue(box.address, attempt, None), client.now() + 20))


def info(client: Client, name: str) -> LockInfo:
    return run(client.store.inspect(name, client.now() + 20))


def people(infos: Any) -> list[str]:
    return [one.holder.partition(".")[0] for one in infos]


def check_admission(found: LockInfo) -> None:
    """One writer, or readers, or permits within the limit, with slots of their own."""
    modes = {one.mode for one in found.holders}
    slots = [slot for one in found.holders for slot in one.slots]
    assert len(modes) <= 1
    assert len(found.holders) <= 1 or modes != {Mode.EXCLUSIVE}
    assert len(slots) == len(set(slots)) <= LIMIT
    fences = [one.fence or 0 for one in found.holders]
    assert fences == sorted(set(fences))


class History:
    """Random operations on etcd, each compared with the memory store. No ttl ends meanwhile."""

    def __init__(self, seed: int, client: Client, name: str) -> None:
        self._random = random.Random(seed)
        self._client = client
        self._space = Space(lambda address, notification: True, lambda: time.time_ns() // 1000)
        self._names = [f"{name}:{number}" for number in range(2)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            name = self._random.choice(self._names)
            wanted = claim(name, self._random.choice(HOLDERS), self._random.choice(tuple(SHAPES)))
            kind = self._random.choice(
                ("take", "queue", "queue", "release", "release", "adopt", "downgrade", "several")
            )
            ours, theirs = (self._plain(answer) for answer in getattr(self, kind)(wanted))
            assert ours == theirs, f"{kind} of {wanted}"
            for each in self._names:
                found, expected = info(self._client, each), self._space.inspect(each, 0.0)
                assert self._plain(found) == self._plain(expected), f"{each} after {kind} of {wanted}"
                check_admission(found)

    def _plain(self, answer: Any) -> Any:
        if isinstance(answer, LockInfo):
            holders = [(one.holder, one.mode, one.slots) for one in answer.holders]
            return holders, [(one.holder, one.mode, one.permits) for one in answer.waiters]
        if isinstance(answer, list):
            return [self._plain(one) for one in answer]
        if isinstance(answer, Granted | Queued | Taken):
            return type(answer), answer.slots if isinstance(answer, Granted) else ()
        return answer

    def _both(self, operation: str, *arguments: Any) -> list[Any]:
        """Run an operation on both; the last argument is the deadline of etcd, and the time of the memory store."""
        answers: list[Any] = []
        for store in (self._client.store, self._space):
            try:
                if store is self._space:
                    answers.append(getattr(store, operation)(*arguments, 0.0))
                else:
                    answers.append(run(getattr(store, operation)(*arguments, self._client.now() + 20)))
            except ConfigurationError as error:
                answers.append(str(error))
        return answers

    def _is_waiting(self, wanted: Claim) -> bool:
        return any(one.holder == wanted.holder for one in self._space.inspect(wanted.name, 0.0).waiters)

    def take(self, wanted: Claim) -> list[Any]:
        return self.queue(wanted) if self._is_waiting(wanted) else self._both("acquire", wanted, None)

    def queue(self, wanted: Claim) -> list[Any]:
        queued = [one for one in self._space._queues.get(wanted.name, ()) if one.claim.holder == wanted.holder]
        # All requests of an acquisition carry the same claim.
        return self._both("acquire", queued[0].claim if queued else wanted, Enqueue("watch", 1, None))

    def release(self, wanted: Claim) -> list[Any]:
        return self._both("release", wanted.name, wanted.holder)

    def adopt(self, wanted: Claim) -> list[Any]:
        if self._is_waiting(wanted):
            return [None, None]
        return self._both("adopt", wanted, claim(wanted.name, self._random.choice(HOLDERS), "read").holder)

    def downgrade(self, wanted: Claim) -> list[Any]:
        return self._both("downgrade", wanted._replace(weight=1, limit=0))

    def several(self, wanted: Claim) -> list[Any]:
        holder = wanted.holder.partition(".")[0]
        claims = [claim(name, holder, self._random.choice(tuple(SHAPES))) for name in self._names]
        return [None, None] if any(map(self._is_waiting, claims)) else self._both("acquire_all", claims)


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_agree_with_the_memory_store(first: Client, name: str, seed: int) -> None:
    History(seed, first, name).run(80)


WORKER = """
import random, sys, time, lockfast
url, name, path, seed, cycles, limit = sys.argv[1:4] + [int(one) for one in sys.argv[4:]]
choose = random.Random(seed)
with lockfast.connect(url) as locks, open(path, "a", buffering=1) as log:
    rwlock = locks.rwlock(name, timeout=60)
    for _ in range(cycles):
        kind = choose.choice(("1", "2", "3", "write") if limit else ("read", "read", "write"))
        if kind.isdigit():
            lease = locks.semaphore(name, limit, timeout=60).acquire(permits=int(kind))
        else:
            lease = (rwlock.reader if kind == "read" else rwlock.writer).acquire()
        log.write("+" + kind + "\\n")
        time.sleep(choose.random() / 100)
        log.write("-" + kind + "\\n")
        lease.release()
"""


def check_log(lines: list[str], limit: int) -> None:
    """Replay what the workers wrote while they held the lock. Each line is one atomic write at the end of the file."""
    inside: Counter[str] = Counter()
    for line in lines:
        inside[line[1:]] += 1 if line[0] == "+" else -1
        held = +inside
        assert held["write"] == 0 or held.total() == 1, held
        assert sum(int(kind) * count for kind, count in held.items() if kind.isdigit()) <= limit, held
    assert not +inside


@pytest.mark.parametrize("limit", [0, LIMIT])
def test_processes_never_hold_two_modes_or_too_many_permits(
    server: Etcd, name: str, tmp_path: Path, limit: int
) -> None:
    log, count, cycles = tmp_path / "log", 5, 12
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, server.url, name, log, str(seed), str(cycles), str(limit)])
        for seed in range(count)
    ]
    assert [worker.wait(120) for worker in workers] == [0] * count
    lines = log.read_text().splitlines()
    assert len(lines) == 2 * count * cycles
    check_log(lines, limit)


def test_claims_at_the_same_moment_take_all_permits(first: Client, second: Client, name: str) -> None:
    """Each grant of permits makes the other claims lose a race. None of them is denied while a permit is free."""
    limit, count = 10, 14
    start = Barrier(count)

    def take(number: int) -> Any:
        start.wait()
        wanted = Claim(name, f"holder{number}", LONG, "host:1:", weight=1, limit=limit)
        return (first if number % 2 else second).acquire(wanted)

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(take, range(count)))
    slots = [answer.slots for answer in answers if isinstance(answer, Granted)]
    assert sorted(slots) == [(slot,) for slot in range(limit)]
    assert sum(isinstance(answer, Taken) for answer in answers) == count - limit
    assert info(first, name).waiting == 0


RACES = {
    ("write", "write"): Taken,
    ("write", "read"): Taken,
    ("write", "one"): Taken,
    ("read", "write"): Taken,
    ("read", "read"): Granted,
    ("read", "one"): ConfigurationError,
    ("one", "write"): Taken,
    ("one", "read"): ConfigurationError,
    ("one", "two"): Granted,
    ("two", "two"): Taken,
}
"""Claims that are written late, claims that were granted meanwhile, and what becomes of the late ones."""


def acquire(client: Client, wanted: Claim) -> Any:
    """The answer, or the error if the other mode is refused."""
    try:
        return client.acquire(wanted)
    except ConfigurationError as error:
        return error


def late_claim(first: Client, second: Client, name: str, late: str, early: str) -> None:
    answer = run_late(
        EtcdDelay(first),
        name,
        lambda: acquire(first, claim(name, "ann", late)),
        lambda: second.acquire(claim(name, "bob", early)),
    )
    check_admission(info(second, name))
    assert isinstance(answer, RACES[late, early])
    assert "bob" in people(info(second, name).holders)


@pytest.mark.parametrize(("late", "early"), RACES)
def test_claim_that_is_written_late_overtakes_no_grant(
    first: Client, second: Client, name: str, late: str, early: str
) -> None:
    late_claim(first, second, name, late, early)


def late_release(first: Client, second: Client, name: str) -> None:
    first.acquire(claim(name, "ann", "read"))
    found: list[Any] = []
    released = run_late(
        EtcdDelay(first),
        name,
        lambda: first.release(name, claim(name, "ann", "read").holder),
        lambda: found.extend(enqueue(second, claim(name, "bob", "write"))),
    )
    assert released is True
    assert isinstance(found[1], Queued)
    assert isinstance(run(found[0].wait(second.now() + 20)), GrantNotification)


def test_waiter_that_a_release_did_not_see_is_granted(first: Client, second: Client, name: str) -> None:
    late_release(first, second, name)


def late_ticket(first: Client, second: Client, name: str) -> None:
    first.acquire(claim(name, "ann", "read"))
    found: list[Any] = []
    run_late(
        EtcdDelay(second),
        name,
        lambda: found.extend(enqueue(second, claim(name, "bob", "write"))),
        lambda: first.release(name, claim(name, "ann", "read").holder),
    )
    assert isinstance(found[1], Granted)


def test_waiter_that_did_not_see_a_release_is_granted(first: Client, second: Client, name: str) -> None:
    late_ticket(first, second, name)


def test_writer_enters_after_two_readers_that_release_at_the_same_moment(
    first: Client, second: Client, name: str
) -> None:
    """Each release sees the other reader, so neither grants the lock to the writer: its watch wakes it."""
    ann, bob, writer = claim(name, "ann", "read"), claim(name, "bob", "read"), claim(name, "cy", "write")
    first.acquire(ann)
    second.acquire(bob)
    box, _ = enqueue(second, writer)
    run_late(
        EtcdDelay(first),
        name,
        lambda: first.release(name, ann.holder),
        lambda: second.release(name, bob.holder),
    )
    assert info(second, name).locked is False
    deadline = second.now() + 20
    assert run(box.wait(deadline)) is None
    assert second.now() < deadline
    assert isinstance(second.acquire(writer), Granted)


ALWAYS = {"key": records.packed(b"lockfast/nothing"), "target": "MOD", "result": "EQUAL", "mod_revision": 0}
MUTANTS: dict[str, tuple[str, Callable[[Client, Client, str], None]]] = {
    "a writer beside a reader": ("none_added", partial(late_claim, late="write", early="read")),
    "a reader beside a writer": ("none_added", partial(late_claim, late="read", early="write")),
    "too many permits": ("none_added", partial(late_claim, late="two", early="two")),
    "a forgotten waiter": ("no_waiter_added", late_release),
}


@pytest.mark.parametrize("broken", MUTANTS)
def test_races_detect_a_missing_condition(
    first: Client, second: Client, name: str, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    condition, race = MUTANTS[broken]
    monkeypatch.setattr(records, condition, lambda *_: ALWAYS)
    with pytest.raises(AssertionError):
        race(first, second, name)


def test_late_release_ends_no_grant_of_another_holder(first: Client, second: Client, name: str) -> None:
    ann, bob = claim(name, "ann", "one"), claim(name, "bob", "three")
    first.acquire(ann)

    def meanwhile() -> None:
        run(second.store.force_release(name, ann.holder, second.now() + 20))
        assert isinstance(second.acquire(bob), Granted)

    assert run_late(EtcdDelay(first), name, lambda: first.release(name, ann.holder), meanwhile) is False
    assert people(info(second, name).holders) == ["bob"]


def test_late_downgrade_changes_no_grant_of_another_holder(first: Client, second: Client, name: str) -> None:
    ann, bob = claim(name, "ann", "write"), claim(name, "bob", "write")
    first.acquire(ann)

    def downgrade() -> bool:
        return run(first.store.downgrade(ann._replace(weight=1), first.now() + 20))

    def meanwhile() -> None:
        run(second.store.force_release(name, ann.holder, second.now() + 20))
        assert isinstance(second.acquire(bob), Granted)

    assert run_late(EtcdDelay(first), name, downgrade, meanwhile) is False
    found = info(second, name)
    assert (people(found.holders), found.mode) == (["bob"], Mode.EXCLUSIVE)


def test_late_claim_for_several_locks_takes_none_if_one_is_taken(first: Client, second: Client, name: str) -> None:
    names = [f"{name}:{number}" for number in range(3)]
    claims = [claim(each, "ann", shape) for each, shape in zip(names, ("write", "read", "two"), strict=True)]
    answer = run_late(
        EtcdDelay(first),
        name,
        lambda: run(first.store.acquire_all(claims, first.now() + 20)),
        lambda: second.acquire(claim(names[2], "bob", "two")),
    )
    assert answer is None
    assert [people(info(second, each).holders) for each in names] == [[], [], ["bob"]]


def lost_reply(client: Client, operation: Callable[[], Any]) -> Any:
    """Run an operation whose reply is lost, and repeat it."""
    EtcdDelay(client).loses_reply = True
    with pytest.raises(StoreUnavailable):
        operation()
    return operation()


@pytest.mark.parametrize("shape", SHAPES)
def test_claim_after_a_lost_reply_finds_its_grant(first: Client, second: Client, name: str, shape: str) -> None:
    wanted = claim(name, "ann", shape)
    granted = lost_reply(first, lambda: first.acquire(wanted))
    (holder,) = info(second, name).holders
    assert (holder.holder, holder.fence, holder.slots) == (wanted.holder, granted.fence, granted.slots)


def test_claim_for_several_locks_after_a_lost_reply_finds_its_grants(first: Client, name: str) -> None:
    claims = [claim(f"{name}:{shape}", "ann", shape) for shape in SHAPES]
    granted = lost_reply(first, lambda: run(first.store.acquire_all(claims, first.now() + 20)))
    assert [one.fence for one in granted] == [info(first, each.name).fence for each in claims]
    assert [len(one.slots) for one in granted] == [0, 0, 1, 2, 3]


def test_lost_reply_to_a_ticket_leaves_one_ticket(first: Client, second: Client, name: str) -> None:
    second.acquire(claim(name, "ann", "two"))
    _, queued = lost_reply(first, lambda: enqueue(first, claim(name, "bob", "two")))
    assert (type(queued), queued.position) == (Queued, 0)
    found = info(second, name)
    assert (people(found.waiters), found.waiting) == (["bob"], 1)


def test_failure_after_the_ticket_was_written_has_an_unknown_outcome(
    first: Client, second: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the caller would not remove the ticket."""
    second.acquire(claim(name, "ann", "write"))

    async def no_server(*_: Any) -> None:
        raise StoreUnavailable("Cannot connect.")

    monkeypatch.setattr(first.store, "_ttl_left", no_server)
    with pytest.raises(StoreUnavailable) as failure:
        enqueue(first, claim(name, "bob", "read"))
    assert failure.value.outcome is Outcome.UNKNOWN
    assert people(info(second, name).waiters) == ["bob"]


def test_lost_reply_to_a_release_grants_each_waiter_once(first: Client, second: Client, name: str) -> None:
    writer = claim(name, "ann", "write")
    first.acquire(writer)
    boxes = [enqueue(second, claim(name, holder, "read"))[0] for holder in ("bob", "cy")]
    assert lost_reply(first, lambda: first.release(name, writer.holder)) is False
    grants = [run(box.wait(second.now() + 20)) for box in boxes]
    found = info(second, name)
    assert [one.fence for one in grants] == [one.fence for one in found.holders]
    assert (people(found.holders), found.waiting) == (["bob", "cy"], 0)


def test_lost_reply_to_a_downgrade_keeps_the_fence(first: Client, second: Client, name: str) -> None:
    ann = claim(name, "ann", "write")
    fence = first.acquire(ann).fence
    reader = ann._replace(weight=1)
    assert lost_reply(first, lambda: run(first.store.downgrade(reader, first.now() + 20))) is True
    (holder,) = info(second, name).holders
    assert (holder.fence, holder.mode) == (fence, Mode.READ)
    assert run(first.store.renew([Renewal(name, ann.holder, LONG, shared=True)], first.now() + 20)) == [True]


@pytest.mark.parametrize("shape", ["read", "two"])
def test_lost_reply_to_a_longer_renewal_extends_the_shared_grant(
    first: Client, second: Client, name: str, shape: str
) -> None:
    """A longer ttl moves the grant to another etcd lease. The client must find out which one."""
    ann = claim(name, "ann", shape, ttl=5)
    granted = first.acquire(ann)
    renewals = [Renewal(name, ann.holder, LONG, shared=True)]
    assert lost_reply(first, lambda: run(first.store.renew(renewals, first.now() + 20))) == [True]
    (holder,) = info(second, name).holders
    assert (holder.fence, holder.slots) == (granted.fence, granted.slots)
    assert (holder.ttl_left or 0) > LONG / 2
    assert first.release(name, ann.holder) is True


def test_readers_enter_together_with_fences_in_their_order(first: Client, second: Client, name: str) -> None:
    """Also if there are more than one transaction can grant. A writer among them stops the readers behind it."""
    writer, count = claim(name, "ann", "write"), BATCH + 5
    fence = first.acquire(writer).fence
    readers = [claim(name, f"reader{number}", "read") for number in range(count)]
    boxes = [enqueue(second, reader)[0] for reader in readers]
    for holder, shape in (("bob", "write"), ("late", "read")):
        enqueue(second, claim(name, holder, shape))
    assert first.release(name, writer.holder) is True
    found = info(second, name)
    assert [one.holder for one in found.holders] == [reader.holder for reader in readers]
    fences = [one.fence or 0 for one in found.holders]
    assert fence < fences[0]
    assert fences == sorted(set(fences))
    assert people(found.waiters) == ["bob", "late"]
    for at in (0, -1):
        assert run(boxes[at].wait(second.now() + 20)) == GrantNotification(1, fences[at])


def test_permits_of_a_killed_process_are_free_after_their_ttl(server: Etcd, name: str) -> None:
    program = (
        "import lockfast, sys\n"
        "permit = lockfast.connect(sys.argv[1]).semaphore(sys.argv[2], 4, ttl=2, permits=4).acquire()\n"
        "print(permit.slots, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, server.url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child, lockfast.connect(server.url) as locks:
        assert child.stdout is not None
        assert child.stdout.readline() == "(0, 1, 2, 3)\n"
        child.kill()
        watch = Stopwatch()
        permit = locks.semaphore(name, 4).acquire(permits=4, timeout=20)
        assert permit is not None
        assert watch.seconds < watch.most(2 + 3)  # the ttl, and etcd's rounding
        assert permit.slots == (0, 1, 2, 3)
        permit.release()


def test_reader_with_a_short_ttl_ends_alone(first: Client, second: Client, name: str) -> None:
    first.acquire(claim(name, "ann", "read"))
    second.acquire(claim(name, "bob", "read", ttl=2))
    until(lambda: people(info(first, name).holders) == ["ann"], "the grant with the short ttl to end")
    assert (info(first, name).ttl_left or 0) > LONG / 2
