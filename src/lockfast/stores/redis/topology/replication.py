"""A master with replicas: find it through its sentinels, and wait until replicas acknowledge a grant.

The client library's Sentinel connections ask their pool for the master's address whenever they connect. lockfast puts
a `Sentinels` object in the place of that pool: the library's own search retries each sentinel for seconds, which is too
slow for a lock.

Acknowledgements (WAIT or WAITAOF after each grant and each renewal) narrow the window in which a failover loses a
grant. They do not close it: a replica that did not acknowledge the grant may become the master.

Rules:

- Each sentinel gets `SENTINEL_TIMEOUT` seconds and no retry. The sentinel that answered last is asked first.
- A master that its sentinel considers down is not used: a failover is in progress, and the next connect asks again.
- When the master changes, both connections to the old one are closed at once. The old master would notify nobody, and
  requests sent to it would be lost.
- A grant that is not acknowledged in time is released, and the error says how many replicas had it. A renewal that is
  not acknowledged does not count: the lease is at risk, and is lost at its deadline.
- WAIT blocks its connection and covers every earlier write on it. There is one WAIT at a time, for all callers that
  wrote before it was sent; later writers share the next one. If all replicas answer, two of them are enough.
- WAIT always has a time limit (0 would mean forever), shorter than the silence that a connection tolerates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

from lockfast.errors import Outcome, StoreError, StoreRefused, StoreUnavailable, shown
from lockfast.facts import Facts
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.error_replies import UnknownCommand, error_of
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.stores.redis.store import FairMutex, Inbox, MutexBusy, RedisStore, Wire
from lockfast.stores.redis.urls import Address
from lockfast.stores.redis.user_client import settled
from lockfast.values import Answer, Claim, Enqueue, Granted, Renewal, clean

log = logging.getLogger("lockfast")

# All in seconds.
SENTINEL_TIMEOUT = 0.5
SEARCH_LIMIT = 0.9  # after which a search asks no further sentinels; the next search continues with them
MAX_WAIT = 1.0  # one WAIT blocks the connection for at most this long
REPLY_MARGIN = 0.5  # after the limit of a WAIT, its reply may take this much longer
UNDO_TIMEOUT = 1.0


class Sentinel(NamedTuple):
    """How to connect to one sentinel."""

    connection_class: Callable[..., Any]
    settings: dict[str, Any]

    async def master(self, service: str) -> dict[str, str]:
        """The fields of the sentinel's reply about a master. Never suspends in the sync flavour."""
        limits = {"socket_timeout": SENTINEL_TIMEOUT, "socket_connect_timeout": SENTINEL_TIMEOUT}
        connection = self.connection_class(**{**self.settings, **limits})
        try:
            await settled(connection.connect())
            await settled(connection.send_command("SENTINEL", "MASTER", service))
            reply = await settled(connection.read_response())
        finally:
            await settled(connection.disconnect())
        parts = [part for pair in reply.items() for part in pair] if isinstance(reply, dict) else reply
        words = [part.decode("utf-8", "replace") if isinstance(part, bytes) else str(part) for part in parts]
        return dict(zip(words[::2], words[1::2], strict=True))


@dataclass(eq=False)
class Sentinels:
    """The sentinels of one service. `on_new_master` is called when the master has changed."""

    is_master: ClassVar = True
    check_connection: ClassVar = False

    service_name: str
    sentinels: Sequence[Sentinel]
    flavour: str
    min_other_sentinels: int = 0
    forced_ip: str | None = None
    on_new_master: Callable[[], None] | None = None
    _master: Address | None = None

    def get_master_address(self) -> Address | Coroutine[Any, Any, Address]:
        """Called by the library's connections, which await the result in the async flavour."""
        return _run(self._find()) if self.flavour == "threads" else self._find()

    async def _find(self) -> Address:
        """The master's address, from the first sentinel that knows a healthy one."""
        problem = "no sentinel is configured"
        give_up_at = time.monotonic() + SEARCH_LIMIT
        for sentinel in tuple(self.sentinels):
            if time.monotonic() > give_up_at:
                break
            others = [one for one in self.sentinels if one is not sentinel]
            self.sentinels = [*others, sentinel]  # if the caller is cancelled here, the next search starts elsewhere
            try:
                address = self._address(await sentinel.master(self.service_name))
            except Exception as error:
                problem = clean(str(error), 120) or type(error).__name__
                continue
            self.sentinels = [sentinel, *others]
            before, self._master = self._master, address
            if before not in (None, address):
                log.warning("Service %s has a new master; reconnecting to it.", shown(self.service_name))
                if self.on_new_master is not None:
                    self.on_new_master()
            return address
        raise StoreUnavailable(
            f"No sentinel reports a healthy master of the service {shown(self.service_name)}, so nothing was sent. "
            f"Check the service name, and whether a failover is in progress. [{problem}]"
        )

    def _address(self, master: dict[str, str]) -> Address:
        flags = master["flags"].split(",")
        if "s_down" in flags or "o_down" in flags or "master" not in flags:
            raise LookupError("the master is down")
        if int(master.get("num-other-sentinels", 0)) < self.min_other_sentinels:
            raise LookupError("the sentinel sees too few other sentinels")
        return self.forced_ip or master["ip"], int(master["port"])


def _run(work: Coroutine[Any, Any, Address]) -> Address:
    """Run a coroutine whose connections block instead of suspending."""
    try:
        work.send(None)
    except StopIteration as stop:
        address: Address = stop.value
        return address
    work.close()
    raise RuntimeError("A sync connection suspended.")


class ReplicaAcks(NamedTuple):
    """How many replicas must acknowledge a grant, and within how many seconds.

    `on_disk`: these replicas and the master must have it on disk.
    """

    replicas: int
    within: float
    on_disk: bool


def wait_request(acks: ReplicaAcks, left: float) -> bytes:
    """
    >>> wait_request(ReplicaAcks(2, 1.0, False), 0.5)
    b'*3\\r\\n$4\\r\\nWAIT\\r\\n$1\\r\\n2\\r\\n$3\\r\\n500\\r\\n'
    """
    limit = b"%d" % max(1, ceil(min(left, MAX_WAIT) * 1000))
    count = b"%d" % acks.replicas
    return pack(b"WAITAOF", b"1", count, limit) if acks.on_disk else pack(b"WAIT", count, limit)


def ack_count(acks: ReplicaAcks, reply: Any) -> int:
    """How many replicas acknowledged; -1 if it must be on disk and the master does not have it there."""
    if isinstance(reply, ReplyError):
        error = error_of(str(reply), "(while waiting for its replicas)")
        if acks.on_disk and (isinstance(error, UnknownCommand) or "appendonly is disabled" in str(reply)):
            raise StoreRefused(
                "The server cannot confirm that a grant is on disk, so the grant was released. aof=True needs Redis "
                f"7.2 or Valkey with `appendonly yes`. [{clean(str(reply), 160)}]"
            )
        raise error
    if not acks.on_disk:
        return int(reply)
    local, replicas = reply
    return int(replicas) if local >= 1 else -1


class SharedWait:
    """One WAIT at a time, shared by all callers that wrote before it was sent.

    Invariants: WAITs are numbered from 1. `_sent` is the number of the last one sent, `_answered` that of the last one
    answered, and `_count` is the number of acknowledgements in that answer.
    """

    def __init__(self, send_wait: Callable[[float], Awaitable[int]], runtime: Runtime) -> None:
        self._send_wait = send_wait
        self._runtime = runtime
        self._mutex = FairMutex(runtime)
        self._sent = self._answered = self._count = 0

    async def count(self, enough: int, until: float) -> int:
        """How many replicas have the caller's earlier writes; fewer than `enough` only if time ran out."""
        covered_by, best = self._sent + 1, -1  # only a WAIT that is sent from now on covers the writes
        while best < enough and self._runtime.now() < until:
            try:
                async with self._mutex.held(until):
                    if self._answered < covered_by:
                        self._sent = number = self._sent + 1
                        self._count = await self._send_wait(until)
                        self._answered = number
                    best, covered_by = max(best, self._count), self._sent + 1
            except MutexBusy:
                break
        return best


class AcknowledgedStore(RedisStore):
    """A store whose grants and renewals count only after replicas acknowledged them."""

    def __init__(self, wire: Wire, inbox: Inbox, runtime: Runtime, acks: ReplicaAcks, **setup: Any) -> None:
        super().__init__(wire, inbox, **setup)
        self._runtime = runtime
        self._acks = acks
        self._shared_wait = SharedWait(self._send_wait, runtime)
        self._capabilities = self._all_capabilities(replica_acks=True)

    @property
    def grace(self) -> float:
        return self.wire.grace + self._acks.within

    async def _send_wait(self, until: float) -> int:
        left = min(MAX_WAIT, until - self._runtime.now())
        request = wait_request(self._acks, left)
        return ack_count(self._acks, await self.wire.request(request, self._runtime.now() + left + REPLY_MARGIN))

    async def _count_acks(self, ttl: float, until: float) -> int:
        """How many replicas have all writes so far. Takes at most half a ttl."""
        limit = self._runtime.now() + min(self._acks.within, ttl / 2)
        return await self._shared_wait.count(self._acks.replicas, min(limit, until))

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        answer = await super().acquire(claim, enqueue, until)
        if not isinstance(answer, Granted):
            return answer
        count = await self._count_acks(claim.ttl, until)
        if count >= self._acks.replicas:
            return Granted(answer.fence, count, answer.slots)
        outcome, state = Outcome.NOT_DONE, "was released again"
        try:
            await super().release(claim.name, claim.holder, self._runtime.now() + UNDO_TIMEOUT)
        except StoreError:
            outcome, state = Outcome.UNKNOWN, "is being released"
        raise StoreUnavailable(f"The lock {shown(claim.name)} {state}: {self._shortfall(count)}", outcome=outcome)

    def _shortfall(self, count: int) -> str:
        acks = self._acks
        if acks.on_disk and count < 0:
            return f"the server did not have it on disk within {acks.within:g} s. Check the speed of its disk."
        have = "have it on disk" if acks.on_disk else "acknowledged it"
        return (
            f"{max(count, 0)} of the {acks.replicas} required replicas {have} within {acks.within:g} s. Check that "
            "they are connected and keep up."
        )

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        granted = await super().adopt(claim, old_holder, until)
        return granted and granted._replace(acknowledged=await self._require_acks(claim.name, claim.ttl, until))

    async def downgrade(self, claim: Claim, until: float) -> bool:
        held = await super().downgrade(claim, until)
        if held:
            await self._require_acks(claim.name, claim.ttl, until)
        return held

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        restored = await super().reassert(claim, fence, until)
        if restored:
            await self._require_acks(claim.name, claim.ttl, until)
        return restored

    async def _require_acks(self, name: str, ttl: float, until: float) -> int:
        """The number of acknowledgements. If there are too few, raise but keep the grant, for a retry."""
        count = await self._count_acks(ttl, until)
        if count < self._acks.replicas:
            problem = f"The renewal of the lease on {shown(name)} does not count: {self._shortfall(count)}"
            raise StoreUnavailable(problem, outcome=Outcome.UNKNOWN)
        return count

    async def renew(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        return await self.acknowledged_renewals(renewals, await super().renew(renewals, until), until)

    async def acknowledged_renewals(
        self, renewals: Sequence[Renewal], answers: Sequence[bool | None], until: float
    ) -> Sequence[bool | None]:
        """Return the answers if the replicas acknowledged the renewals; else raise.

        If a lease is lost, return instead of raising, so that the loss is reported: then True becomes None.
        """
        if not any(answers):
            return answers
        try:
            await self._require_acks(renewals[0].name, min(renewal.ttl for renewal in renewals), until)
        except StoreUnavailable:
            if False in answers:  # lost leases must be reported in any case
                return [None if answer else answer for answer in answers]
            raise
        return answers

    def reset(self, *, forked: bool) -> None:
        super().reset(forked=forked)
        self._shared_wait = SharedWait(self._send_wait, self._runtime)

    async def facts(self, until: float) -> Facts:
        return (await super().facts(until))._replace(acknowledged=self._acks.replicas)
