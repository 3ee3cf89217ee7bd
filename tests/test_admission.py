"""Scripts and transactions keep the rules of the memory store: the same random histories give corresponding answers.

Both run in virtual time. After each operation the answers and the notifications of both must correspond. Fences and
tickets may be other numbers, as long as they correspond one to one and in the same order. All operations happen within
the first milliseconds of a `STEP`, and all ttls end in the middle of one, so both stores see the same grants expire.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lockfast.errors import ConfigurationError
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.memory import Space
from lockfast.stores.redis.fallback.decisions import SharedLock
from lockfast.stores.redis.fallback.transactions import EXEC, MULTI, UNWATCH, TransactionStore
from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.protocol.notifications import notification_in
from lockfast.stores.redis.protocol.replies import slots_in
from lockfast.stores.redis.store import RedisStore
from lockfast.values import (
    Claim,
    Enqueue,
    FirstNotification,
    Granted,
    GrantNotification,
    LockInfo,
    Mode,
    Notification,
    Page,
    Queued,
    Renewal,
    Taken,
)
from tests.test_virtual import DirectWire, NoInbox
from verify import mutation
from verify.virtual_server import VirtualRedis

STEP = 0.04
REQUEST = 0.000_137  # between two requests, so that each has its own time
TTLS = tuple(STEP * (steps + 0.5) for steps in (1, 2, 5, 30))
NAMES = ("door", "gate{1}", "a}b")
HOLDERS = ("ann", "bob", "cy", "dan", "eve")
INBOXES = {"ann": "north", "bob": "north", "cy": "south", "dan": "south", "eve": "west"}
LENGTH = 55
SHAPES = {
    "mutex": ((0, 0),),
    "readers": ((0, 0), (1, 0), (1, 0)),
    "permits": ((0, 0), (1, 2), (2, 3), (1, 3), (3, 4), (9, 12)),
    "all": ((0, 0), (1, 0), (1, 2), (2, 3)),
}
WEIGHTS = {
    "take": 3,
    "queue": 10,
    "release": 6,
    "renew": 3,
    "adopt": 2,
    "downgrade": 2,
    "acquire_all": 2,
    "force_release": 1,
    "inspect": 2,
    "listing": 1,
    "pass_time": 4,
    "open_inbox": 3,
    "close_inbox": 1,
    "delete": 0.3,
}


class Numbers:
    """Replaces the fences and tickets of each lock by their order of appearance, and keeps their real order."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], dict[int, int]] = {}

    def __call__(self, kind: str, name: str, value: int | None) -> int | None:
        seen = self._seen.setdefault((kind, name), {})
        return None if value is None else seen.setdefault(value, len(seen))

    def in_order(self) -> dict[tuple[str, str], list[int]]:
        return {key: [seen[value] for value in sorted(seen)] for key, seen in self._seen.items()}


def left(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds // STEP)


class Side:
    """One of the two stores: runs an operation and returns what can be compared."""

    def __init__(self) -> None:
        self.numbers = Numbers()

    def call(self, name: str, operation: Callable[[], Any]) -> Any:
        try:
            return self.plain(name, operation())
        except ConfigurationError as error:
            return str(error)

    def plain(self, name: str, value: Any) -> Any:
        if isinstance(value, Granted | GrantNotification):
            return "granted", self.numbers("fence", name, value.fence), value.slots
        if isinstance(value, Queued):
            return "queued", self.numbers("ticket", name, value.ticket), value.position, left(value.ttl_left)
        if isinstance(value, Taken | FirstNotification):
            return type(value).__name__, left(value.ttl_left)
        if isinstance(value, LockInfo):
            return self._info(value)
        if isinstance(value, Page):
            return sorted((one.name, self._info(one)[:2], one.locked) for one in value.infos), value.cursor
        return value

    def batch(self, names: list[str], answers: Any) -> Any:
        return answers and [self.plain(name, one) for name, one in zip(names, answers, strict=True)]

    def _info(self, info: LockInfo) -> tuple[Any, ...]:
        holders = tuple(
            (
                one.holder,
                one.owner,
                self.numbers("fence", info.name, one.fence),
                None if one.held_for is None else round(one.held_for / STEP),
                left(one.ttl_left),
                one.mode,
                one.slots,
            )
            for one in info.holders
        )
        waiters = tuple((one.holder, one.owner, one.mode, one.permits) for one in info.waiters)
        return holders, self.numbers("fence", info.name, info.fence), waiters, info.waiting


class TransactionWire(DirectWire):
    """Runs the requests of transactions. They never overlap, so none loses a race."""

    silent_since = None

    async def connect(self, until: float) -> bool:
        return False

    async def post(self, requests: Sequence[bytes], until: float, on: Any = None) -> tuple[None, list[Any]]:
        replies: list[Any] = []
        queue: list[bytes] | None = None
        for request in requests:
            if request == EXEC and queue is not None:
                replies.append([self._execute(one) for one in queue])
            elif request == MULTI:
                queue = []
                replies.append(b"OK")
            elif request == UNWATCH or b"WATCH" in request:
                replies.append(b"OK")
            elif queue is not None:
                queue.append(request)
                replies.append(b"QUEUED")
            else:
                replies.append(self._execute(request))
        return None, replies

    async def collect(self, posted: tuple[None, list[Any]], until: float) -> list[Any]:
        return posted[1]


class Both:
    """Scripts (and transactions) on a virtual server, and a `Space` with the same clock and the same open inboxes."""

    def __init__(self, *, transactions: bool = False) -> None:
        self.server = VirtualRedis()
        self._scripts = RedisStore(DirectWire(self.server.execute), NoInbox())
        self._transactions = TransactionStore(TransactionWire(self.server.execute), ThreadRuntime())
        self._stores = [self._scripts, self._transactions] if transactions else [self._scripts]
        self._random = random.Random(0)
        self.inboxes: set[str] = set()
        self.delivered: list[tuple[str, Notification]] = []
        self.space = Space(self._deliver, lambda: self.server.now_us)
        self.scripts, self.memory = Side(), Side()
        self.tickets: dict[tuple[str, str], tuple[int, int]] = {}

    @property
    def now(self) -> float:
        return self.server.now_us / 1e6

    @property
    def store(self) -> RedisStore:
        return self._random.choice(self._stores)

    def _deliver(self, address: str, notification: Notification) -> bool:
        inbox, _, holder = address.partition("/")
        if inbox in self.inboxes:
            self.delivered.append((holder, notification))
        return inbox in self.inboxes

    def notifications(self, side: Side, name: str, sent: list[tuple[str, Notification]]) -> dict[str, list[Any]]:
        """Per inbox, in order. The scripts may tell a waiter that it is first and then grant it the lock."""
        found: dict[str, list[Any]] = {}
        for number, (holder, one) in enumerate(sent):
            granted = any(later == holder and isinstance(it, GrantNotification) for later, it in sent[number + 1 :])
            if not granted:
                found.setdefault(INBOXES[holder], []).append((holder, one.attempt, side.plain(name, one)))
        return found

    def check(self, name: str, ours: Any, theirs: Any) -> None:
        assert ours == theirs
        messages = [notification_in([b"message", b"", one.payload]) for one in self.server.messages]
        sent = [one for one in messages if one is not None]
        assert len(sent) == len(self.server.messages)
        self.server.messages.clear()
        found, wanted = (
            self.notifications(self.scripts, name, sent),
            self.notifications(self.memory, name, self.delivered),
        )
        self.delivered.clear()
        assert found == wanted

    def check_keys(self) -> None:
        """Every key has a ttl, and the slots in use are those of the grants."""
        assert [key for key, entry in self.server.data.items() if entry.expires_ms is None] == []
        for name in NAMES:
            keys = keys_of(name)
            if self.server.call("GET", keys.lock) != b"lockfast:permits":
                continue
            entries = (self.server.call("HGETALL", keys.details) or [])[1::2]
            slots = [slot for entry in entries for slot in slots_in(entry.split(b" ")[3])]
            assert len(slots) == len(set(slots))
            assert self.server.call("BITCOUNT", keys.slots) == len(slots)


class History:
    """Random operations on both."""

    def __init__(self, seed: int, shapes: tuple[tuple[int, int], ...], *, transactions: bool = False) -> None:
        self.random = random.Random(seed)
        self.shapes = shapes
        self.transactions = transactions
        self.both = Both(transactions=transactions)
        self.attempt = 0

    def run(self) -> None:
        for inbox in ("north", "south"):
            self.open_inbox(inbox)
        for _ in range(LENGTH):
            self.both.server.advance(REQUEST)
            (kind,) = self.random.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))
            if self.transactions and kind in ("queue", "acquire_all"):
                kind = "take"  # transactions have no queue, and grant one lock at a time
            self.step(kind, self.random.choice(NAMES[:2]), self.random.choice(HOLDERS))
            self.both.check_keys()
        for name in NAMES:
            self.inspect(name, "ann")
        assert self.both.scripts.numbers.in_order() == self.both.memory.numbers.in_order()
        self.both.server.advance(11 + TTLS[-1])  # `_shared.lua` keeps its keys for ten seconds longer
        self.both.server.snapshot()
        assert {key for key in self.both.server.data if b"}:m" not in key} == set()

    def step(self, kind: str, name: str, holder: str) -> None:
        self.remove_expired(name)
        getattr(self, kind)(name, holder)

    def remove_expired(self, name: str) -> None:
        """If all tickets have expired, remove them: the scripts' queue expires with the last, that of a `Space` not."""
        if not self.both.space.inspect(name, self.both.now).waiting:
            self.release(name, "nobody")

    def claim(self, name: str, holder: str, **more: int) -> Claim:
        weight, limit = self.random.choice(self.shapes)
        if self.transactions:  # which look for the holder only in the mode of the claim
            modes = {one.holder: one.mode for one in self.both.space.inspect(name, self.both.now).holders}
            if holder in modes:
                weight, limit = {Mode.EXCLUSIVE: (0, 0), Mode.READ: (1, 0), Mode.PERMITS: (1, 2)}[modes[holder]]
        return Claim(name, holder, self.random.choice(TTLS), f"host:7:{holder}", weight=weight, limit=limit, **more)

    def compare(self, name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
        both = self.both
        both.check(name, both.scripts.call(name, ours), both.memory.call(name, theirs))

    def pass_time(self, name: str, holder: str) -> None:
        now = self.both.server.now_us
        step = round(STEP * 1e6)
        self.both.server.advance((self.random.choice((1, 1, 2, 3, 6)) * step) / 1e6)
        assert (now - self.both.server.now_us) % step == 0

    def open_inbox(self, name: str, holder: str = "") -> None:
        inbox = INBOXES[holder] if holder else name
        self.both.inboxes.add(inbox)
        self.both.server.subscribe(inbox, inbox.encode())

    def close_inbox(self, name: str, holder: str) -> None:
        self.both.inboxes.discard(INBOXES[holder])
        self.both.server.unsubscribe(INBOXES[holder])

    def delete(self, name: str, holder: str) -> None:
        self.both.server.call("DEL", name)
        self.both.space.drop(name)

    def take(self, name: str, holder: str) -> None:
        both, claim = self.both, self.claim(name, holder)
        if all(one.holder != holder for one in both.space.inspect(name, both.now).holders):
            floor = 0 if self.transactions else both.server.now_us + 400  # a quorum needs scripts
            claim = claim._replace(floor=self.random.choice((0, 0, floor)))
        if claim.mode is Mode.EXCLUSIVE:
            claim = claim._replace(fences=self.random.choice((1, 10)))
        self.compare(
            name,
            lambda: run(both.store.acquire(claim, None, 0.0)),
            lambda: both.space.acquire(claim, None, both.now),
        )

    def queue(self, name: str, holder: str) -> None:
        both, claim = self.both, self.claim(name, holder)
        self.attempt += 1
        ours, theirs = both.tickets.get((name, holder), (None, None))
        queued = any(one.holder == holder for one in both.space.inspect(name, both.now).waiters)
        if queued and self.random.random() < 0.4:
            ours = theirs = None  # a repeat after a lost reply
        answers: list[Any] = []

        def noted(answer: Any) -> Any:
            answers.append(answer)
            return answer

        inbox = INBOXES[holder]
        self.compare(
            name,
            lambda: noted(run(both.store.acquire(claim, Enqueue(inbox, self.attempt, ours), 0.0))),
            lambda: noted(both.space.acquire(claim, Enqueue(f"{inbox}/{holder}", self.attempt, theirs), both.now)),
        )
        if len(answers) == 2 and isinstance(answers[0], Queued):
            both.tickets[name, holder] = answers[0].ticket, answers[1].ticket

    def acquire_all(self, name: str, holder: str) -> None:
        both = self.both
        names = list(NAMES[: self.random.choice((2, 3))])
        for one in names:
            self.remove_expired(one)
        claims = [self.claim(one, holder) for one in names]
        ours = run(both.store.acquire_all(claims, 0.0))
        theirs = both.space.acquire_all(claims, both.now)
        both.check(name, both.scripts.batch(names, ours), both.memory.batch(names, theirs))

    def renew(self, name: str, holder: str) -> None:
        both, renewals = self.both, []
        for one in NAMES[:2]:
            modes = {it.holder: it.mode for it in both.space.inspect(one, both.now).holders}
            exclusive = modes.get(holder, Mode.EXCLUSIVE) is Mode.EXCLUSIVE
            shared, final = not exclusive or self.random.random() < 0.5, self.random.random() < 0.3
            renewals.append(Renewal(one, holder, self.random.choice(TTLS), final, shared))
        self.compare(
            name,
            lambda: run(both.store.renew(renewals, 0.0)),
            lambda: [both.space.renew(one, both.now) for one in renewals],
        )

    def release(self, name: str, holder: str) -> None:
        both = self.both
        self.compare(
            name, lambda: run(both.store.release(name, holder, 0.0)), lambda: both.space.release(name, holder, both.now)
        )

    def adopt(self, name: str, holder: str) -> None:
        both, claim, old = self.both, self.claim(name, holder), self.random.choice(HOLDERS)
        if any(one.holder == holder for one in both.space.inspect(name, both.now).waiters):
            return  # an adoption has a new holder id
        self.compare(
            name, lambda: run(both.store.adopt(claim, old, 0.0)), lambda: both.space.adopt(claim, old, both.now)
        )

    def downgrade(self, name: str, holder: str) -> None:
        both, claim = self.both, self.claim(name, holder)._replace(weight=1, limit=0)
        self.compare(name, lambda: run(both.store.downgrade(claim, 0.0)), lambda: both.space.downgrade(claim, both.now))

    def force_release(self, name: str, holder: str) -> None:
        both = self.both
        self.compare(
            name,
            lambda: run(both.store.force_release(name, holder, 0.0)),
            lambda: both.space.force_release(name, holder, both.now),
        )

    def inspect(self, name: str, holder: str) -> None:
        both = self.both
        self.compare(name, lambda: run(both.store.inspect(name, 0.0)), lambda: both.space.inspect(name, both.now))

    def listing(self, name: str, holder: str) -> None:
        both = self.both
        self.compare(name, lambda: run(both.store.listing("*", "", 0.0)), lambda: both.space.listing("*", "", both.now))


@pytest.mark.parametrize("shapes", SHAPES)
def test_scripts_and_memory_agree(shapes: str) -> None:
    for seed in range(100):
        try:
            History(seed, SHAPES[shapes]).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("shapes", SHAPES)
def test_transactions_and_memory_agree(shapes: str) -> None:
    """Clients with and without scripts take turns on the same keys."""
    for seed in range(100):
        try:
            History(seed, SHAPES[shapes], transactions=True).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


class TestEviction:
    """The server may evict keys that have a ttl. Losing the keys beside a shared lock lets nobody in too early."""

    @pytest.fixture(params=["g", "d", "s", "gd", "gds"])
    def lost(self, request: pytest.FixtureRequest) -> list[bytes]:
        keys = keys_of("door")
        return [{"g": keys.grants, "d": keys.details, "s": keys.slots}[kind] for kind in request.param]

    @pytest.mark.parametrize("held", [(1, 0), (3, 3)])
    def test_others_stay_out_until_the_grant_ends(self, lost: list[bytes], held: tuple[int, int]) -> None:
        both = Both(transactions=True)
        holder = Claim("door", "ann", 10.0, "", weight=held[0], limit=held[1])
        writer, newcomer = Claim("door", "bob", 10.0, ""), holder._replace(holder="cy")
        assert isinstance(run(both.store.acquire(holder, None, 0.0)), Granted)
        both.server.call("DEL", *lost)
        for claim in (writer, newcomer)[: 2 if holder.limit else 1]:
            assert isinstance(run(both.store.acquire(claim, None, 0.0)), Taken)
        both.server.advance(10.002)
        assert isinstance(run(both.store.acquire(writer, None, 0.0)), Granted)
        assert run(both.store.release("door", "bob", 0.0))
        granted = run(both.store.acquire(newcomer, None, 0.0))
        assert isinstance(granted, Granted)
        assert granted.slots == (0, 1, 2)[: holder.limit]
        both.check_keys()


@pytest.mark.parametrize("transactions", [False, True])
def test_renewals_pass_over_foreign_data(transactions: bool) -> None:
    both = Both(transactions=transactions)
    claims = [Claim(name, "ann", 10.0, "", weight=1) for name in NAMES]
    for claim in claims:
        run(both.store.acquire(claim, None, 0.0))
    both.server.call("DEL", keys_of(NAMES[0]).grants)
    both.server.call("SET", keys_of(NAMES[0]).grants, "other data")
    both.server.call("DEL", NAMES[1])
    both.server.call("HSET", NAMES[1], "field", "other data")
    assert run(both.store.renew([Renewal(one, "ann", 20.0, shared=True) for one in NAMES], 0.0)) == [False, False, True]


def run_all(seeds: int, *, transactions: bool = False) -> None:
    for seed in range(seeds):
        for shapes in SHAPES.values():
            History(seed, shapes, transactions=transactions).run()


SCRIPT_MUTANTS = {
    "expired grants count": ("acquire", "if #expired == 0 then return held end", "if held then return held end"),
    "the lock outlasts its grants": ("release", "keep_lock(math.ceil((longest - now) / 1000))", "do end"),
    "a shorter grant shortens the lock": (
        "acquire_all",
        "if not held or call('PTTL', lock) < tonumber(ttl_ms) then",
        "do",
    ),
    "a slot is not freed": ("release", "call('SETBIT', slots, slot, '0')", "do end"),
    "the limit is ignored": ("acquire", "used > 0 and used + weight <= tonumber(limit)", "used > 0"),
    "a writer enters beside readers": ("release", "if weight == '0' then return false end", "if false then return end"),
    "a reader overtakes the queue": ("acquire", "mine = call('EXISTS', queue) == 0 and admitted", "mine = admitted"),
    "only one reader enters": (
        "release",
        "if received then\n        notify = true",
        "if received then\n        return",
    ),
    "the next waiter is not notified": ("release", "if head == caller or not notify then return end", "do return end"),
    "permits wait for the longest grant": ("acquire", "if held ~= PERMITS or limit == '0'", "if held"),
    "a downgrade changes the fence": ("downgrade", "math.max(1, fence_in(call('GET', meta)))", "now"),
    "a downgrade does not serve the queue": ("downgrade", "serve(READ, '', true)", "do end"),
    "a final renewal does not shorten": (
        "renew_shared",
        "if is_final then\n      call('ZADD'",
        "if false then\n      call('ZADD'",
    ),
    "a renewal extends the lock only": ("renew_shared", "call('ZADD', grants, deadline, holder) end", "do end end"),
    "an adoption loses the slots": ("adopt", "call('SETBIT', slots, slot, '1')", "do end"),
    "an adoption changes the mode": ("adopt", "not exclusive and held == mode and call", "is_shared(held) and call"),
    "a forced release keeps the fence": (
        "force_release",
        "fence_in(call('GET', meta)) + 1)",
        "0)\n  if now then fence = fence_in(call('GET', meta)) end",
    ),
    "several locks overtake a queue": ("acquire_all", "(call('EXISTS', queue) == 1 or not admitted", "(not admitted"),
}


@pytest.mark.parametrize("name", SCRIPT_MUTANTS)
def test_error_in_a_script_is_found(name: str) -> None:
    with mutation.lua(*SCRIPT_MUTANTS[name]), pytest.raises(AssertionError):
        run_all(400)


TRANSACTION_MUTANTS = {
    "expired grants count": ("__init__", "if grant.deadline_us > self._now_us}", "if True}"),
    "the slots are not written": ("_ttls", "if used == before:", "if True:"),
    "the lock ends with the newest grant": ("_ttls", "longest = max(", "longest = min("),
    "the last grant leaves the lock": ("decision", "if gone:", "if False:"),
    "a renewal shortens": ("_keep", "deadline if final else max(deadline, own.deadline_us)", "deadline"),
    "an adoption changes the mode": ("adopt", "or self._mode is not claim.mode", ""),
    "a downgrade changes the fence": ("downgrade", "max(1, self.found.fence)", "self._now_us"),
    "a forced release keeps the fence": ("force_release", "if released:", "if False:"),
}


@pytest.mark.parametrize("name", TRANSACTION_MUTANTS)
def test_error_in_a_transaction_is_found(name: str) -> None:
    with mutation.python(SharedLock, *TRANSACTION_MUTANTS[name]), pytest.raises(AssertionError):
        run_all(400, transactions=True)
