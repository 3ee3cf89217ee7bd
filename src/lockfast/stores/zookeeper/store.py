"""`ports.Store` on ZooKeeper 3.5 or later, through kazoo.

Each operation reads a lock's nodes, decides, and writes in a transaction if the lock is unchanged:

    /lockfast/=NAME                             the lock; NAME is quoted; its version counts the grants
    /lockfast/=NAME/id:RANDOM                   exists as long as the lock's node
    /lockfast/=NAME/grant:HOLDER:RANDOM         a grant: holder id, owner, ttl, mode and slots; its last change starts
                                                the ttl
    /lockfast/=NAME/waiter:HOLDER:0000000007    a waiter; ordered by the sequence number that ZooKeeper appends

Rules:

- A grant is no ephemeral node. Those end with the session, and a session can end before a lease does, so a holder with
  a short network failure would lose its lock.
- The version of a node starts at 0 when the node is created again, so a delayed write could match a later one. A write
  to a grant depends on a node whose name is never used again. A write to the lock depends on its version and on the
  node `id:RANDOM`, which is created and deleted together with the lock's node.
- Every transaction that creates a grant checks and increments the version of the lock's node, so of two claims that
  race only one is granted. To end a grant or to downgrade it needs no such check: that only admits more claims.
- A reader that joins a reader depends on the node of that reader instead. While it exists, only readers are granted, so
  readers that arrive together do not disturb each other.
- An expired grant is deleted in the transaction that grants the lock next, so a late renewal cannot revive it.
- The fence is the transaction id that created the grant's node: ZooKeeper never repeats one. So each transaction
  creates one grant of a lock. Those of a batch are sent together, and each depends on the grant before it.
- A lost race is not an answer: the operation starts again.
- Time is ZooKeeper's alone: the timestamp of a node that it writes.
- A lock is handed off in the transaction that releases it. A waiter watches its own ticket, which is deleted by the
  transaction that grants its claim. A ticket that is gone without a grant is lost, and the waiter enqueues again.
- A new ticket is no change of the lock. So the waiter reads the lock again after it has created the ticket, and a
  release reads the queue again if holders remain: one of the two sees the other.

Differences to the other stores:

- ZooKeeper does not detect a dead waiter. A crashed waiter may be granted the lock, which then lasts for its ttl. A
  waiter that did not refresh its ticket for its whole ttl loses it.
- A waiter that becomes first in the queue is not notified.
- A free lock has no fence to show.
- The nodes of a crashed holder stay, as a free lock, until the name is used again.
- A claim reads the node of every holder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote

from lockfast import values
from lockfast.admission import LiveGrant, admit, refuse_other_mode
from lockfast.errors import Outcome, StoreUnavailable, closed_error, shown
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.zookeeper.client import Session
from lockfast.stores.zookeeper.nodes import (
    ROOT,
    Children,
    NewGrant,
    Node,
    Plan,
    State,
    extended,
    grant_prefix,
    live_grant,
    lock_path,
    node_data,
    ticket_of,
    waiter_prefix,
)
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Mode, Page, Queued, Renewal, Taken, clean, fits

ROUNDS = 100  # how often an operation starts again after a lost race, which means progress for another client
MOST_PAUSE_MS = 128
ANY_VERSION = -1
BATCH = 100  # how many waiters are served together
MOST_HOLDERS = 1000
MOST_WAITERS = 200
LISTED_HOLDERS = 100
PAGE = 50


class ZooKeeperMailbox:
    """`ports.Mailbox`: a watch on the waiter's own ticket.

    `written_by` is the transaction that wrote the ticket for the request `attempt`, the last one answered "queued". A
    grant created after it is newer than that answer, so it answers that request.
    """

    address = "watch"

    def __init__(self, store: ZooKeeperStore, runtime: Runtime, holder: str) -> None:
        self._store = store
        self._waker = runtime.waker()
        self.wake = self._waker.wake
        self._holder = holder
        self.name, self.ticket, self.attempt, self.written_by = "", "", 0, 0

    async def open(self, until: float) -> None:
        """Nothing to do: `wait` reads the ticket before it waits."""

    def _changed(self, event: Any) -> None:
        self.wake()

    async def wait(self, until: float) -> values.Notification | None:
        while True:
            if self._store.waits_cancelled:
                raise closed_error()
            if not await self._store.has_ticket(self.ticket, until, self._changed):
                own = await self._store.read_grant(self.name, self._holder, until)
                if own is None or own.created_by <= self.written_by:
                    return None  # the ticket was lost: the next request creates another one
                return values.GrantNotification(self.attempt, own.created_by, own.slots)
            if not await self._waker.wait(until):
                return None

    def close(self) -> None:
        self._store.boxes.pop(self._holder, None)


class ZooKeeperStore(Store):
    """`boxes` has the mailbox of every waiting acquisition."""

    grace = 0.3
    capabilities = Capabilities(readers=True, permits=True, batches=True)

    def __init__(self, session: Session, runtime: Runtime) -> None:
        self._session = session
        self._runtime = runtime
        self.boxes: dict[str, ZooKeeperMailbox] = {}
        self.waits_cancelled = False

    def mailbox(self, holder: str) -> Mailbox:
        box = self.boxes[holder] = ZooKeeperMailbox(self, self._runtime, holder)
        return box

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        for lost_races in range(ROUNDS):
            state = await self._read(claim.name, until, lost_races)
            own = state.grant_of(claim.holder)
            if own is not None:
                if await self._write(own, extended(own, claim.ttl), until):
                    return Granted(own.created_by, slots=own.slots)
                continue
            if not state.children.starting(waiter_prefix(claim.holder)):
                refuse_other_mode(state.live, claim)
            plan = await self._plan(state, until, claim)
            if plan.new or plan.gone:
                granted = await self._change(state, plan, until)
                if granted and claim.holder in granted:
                    return granted[claim.holder]
                continue
            if enqueue is None:
                return Taken(state.ttl_left(claim))
            queued = await self._enqueue(state, claim, enqueue, until)
            if queued is not None:
                return queued
        raise _too_busy(claim.name)

    async def _enqueue(self, state: State, claim: Claim, enqueue: Enqueue, until: float) -> Queued | None:
        """Refresh the ticket. None if it is new or was lost: then the lock must be read again."""
        data, order = node_data(claim), state.children.waiters
        own = next(iter(state.children.starting(waiter_prefix(claim.holder))), None)
        if own is None:
            path = f"{lock_path(claim.name)}/{waiter_prefix(claim.holder)}"
            await self._session.request(lambda client: client.create_async(path, data, sequence=True), until)
            return None
        stat = await self._session.request(lambda client: client.set_async(own, data), until)
        if stat is None:
            return None
        box = self.boxes.get(claim.holder)
        if box is not None:
            box.name, box.ticket, box.attempt, box.written_by = claim.name, own, enqueue.attempt, stat.mzxid
        return Queued(ticket_of(own), order.index(own), state.ttl_left(claim))

    async def _plan(self, state: State, until: float, claim: Claim | None = None, ended: Node | None = None) -> Plan:
        """Admit waiters from the head of the queue, and then `claim`, as if the grant `ended` were gone."""
        kept = [node for node in state.grants if node is not ended]
        live, holders = list(map(live_grant, kept)), {node.holder for node in kept}
        plan, order = Plan([], []), state.children.waiters
        if any(grant.mode is Mode.EXCLUSIVE for grant in live):
            return plan

        def admitted(wanted: Claim, ticket: str | None) -> bool:
            slots = admit(live, wanted)
            if slots is None:
                return False
            plan.new.append(self._new_grant(wanted, slots, ticket))
            live.append(LiveGrant(wanted.mode, slots, None))
            holders.add(wanted.holder)
            return True

        for part in (order[:1], order[1:BATCH]):  # a waiter for an exclusive lock needs no other
            for waiter in await self._nodes(part, until):
                is_caller = claim is not None and waiter.holder == claim.holder
                if waiter.holder in holders or (waiter.is_expired(state.now_ms) and not is_caller):
                    plan.gone.append(waiter)
                elif not admitted(waiter.claim(state.children.name), waiter.path) or not waiter.weight:
                    return plan
        if claim is not None and claim.holder not in holders and len(order) <= BATCH:
            admitted(claim, None)
        return plan

    def _new_grant(self, claim: Claim, slots: tuple[int, ...], ticket: str | None = None) -> NewGrant:
        path = f"{lock_path(claim.name)}/{grant_prefix(claim.holder)}{self._random()}"
        return NewGrant(claim, slots, path, ticket)

    def _random(self) -> str:
        return quote(self._runtime.new_holder_id(), safe="")

    async def _change(
        self, state: State, plan: Plan, until: float, ended: Sequence[Node] = ()
    ) -> dict[str, Granted] | None:
        """End the grants `ended` and execute `plan`. Return the new grants by holder id; None after a lost race.

        A later grant depends on the node of the grant before it: the version of the lock's node alone could be due to
        another client.
        """
        if len(state.expired) > BATCH:  # too many for one transaction
            await self._session.requests([_deletion(node.path, node.version) for node in state.expired], until)
            return None
        folder, version = lock_path(state.children.name), state.children.version

        def begin(transaction: Any) -> None:
            self._begin(transaction, state, plan, ended)

        def follow(number: int) -> Callable[[Any], None]:
            def change(transaction: Any) -> None:
                transaction.check(plan.new[number - 1].path, ANY_VERSION)
                joins = plan.new[number].claim.mode is Mode.READ
                transaction.set_data(folder, b"", ANY_VERSION if joins else version + number)
                add_grant(transaction, plan.new[number])

            return change

        replies = await self._transact([begin, *map(follow, range(1, len(plan.new)))], until)
        if replies[0] is None:
            return None
        done = [(new, reply[-1].czxid) for new, reply in zip(plan.new, replies, strict=False) if reply is not None]
        return {new.claim.holder: Granted(fence, slots=new.slots) for new, fence in done}

    def _begin(self, transaction: Any, state: State, plan: Plan, ended: Sequence[Node]) -> None:
        """Add the operations up to the first grant. If nothing is left of the lock, delete its node."""
        children = state.children
        folder = lock_path(children.name)
        if not children.ids:
            transaction.create(folder)
            transaction.create(f"{folder}/id:{self._random()}")
        else:
            kept = [node for node in state.grants if node not in ended]
            joins = bool(kept and plan.new and plan.new[0].claim.mode is Mode.READ)
            transaction.check(kept[-1].path if joins else children.ids[0], ANY_VERSION)
            if plan.new:
                transaction.set_data(folder, b"", ANY_VERSION if joins else children.version)
        for node in (*state.expired, *ended, *plan.gone):
            transaction.delete(node.path, node.version)
        deleted = len(state.expired) + len(ended) + len(plan.gone)
        if plan.new:
            add_grant(transaction, plan.new[0])
        elif deleted == len(children.grants) + len(children.waiters) + len(children.others):
            for path in (*children.ids, folder):
                transaction.delete(path)

    async def _serve(self, name: str, until: float) -> None:
        """Grant from the head of the queue while it is admitted; delete the node of a lock that nobody uses.

        Lost races are not reported: the clients that won them have served the queue.
        """
        for _ in range(ROUNDS):
            children = await self._children(name, until)
            if not children.ids or (children.grants and not children.waiters):
                return
            state = await self._load(children, until, children.grants)
            plan = await self._plan(state, until)
            if state.grants and not plan.new and not plan.gone:
                return
            await self._change(state, plan, until)

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> Sequence[Granted] | None:
        for lost_races in range(ROUNDS):
            steps: list[tuple[State, Node | NewGrant]] = []
            for claim in claims:
                state = await self._read(claim.name, until, lost_races)
                own = state.grant_of(claim.holder)
                slots = admit(state.live, claim, queued_before=bool(state.children.waiters))
                if (own is None and slots is None) or len(state.expired) > BATCH:
                    return None
                steps.append((state, self._new_grant(claim, slots or ()) if own is None else own))

            def change(transaction: Any, steps: list[tuple[State, Node | NewGrant]] = steps) -> None:
                for claim, (state, grant) in zip(claims, steps, strict=True):
                    if isinstance(grant, Node):
                        transaction.set_data(grant.path, extended(grant, claim.ttl), grant.version)
                    else:
                        self._begin(transaction, state, Plan([grant], []), ())

            (reply,) = await self._transact([change], until)
            if reply is not None:  # its last operation wrote a grant
                fences = [grant.created_by if isinstance(grant, Node) else reply[-1].mzxid for _, grant in steps]
                return [Granted(fence, slots=grant.slots) for fence, (_, grant) in zip(fences, steps, strict=True)]
        raise _too_busy(claims[0].name)

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        return [await self._renew(renewal, until) for renewal in renewals]

    async def _renew(self, renewal: Renewal, until: float) -> bool:
        for _ in range(ROUNDS):
            own = await self.read_grant(renewal.name, renewal.holder, until)
            if own is None:
                return False
            if await self._write(own, extended(own, renewal.ttl, final=renewal.final), until):
                return True
        raise _too_busy(renewal.name)

    async def downgrade(self, claim: Claim, until: float) -> bool:
        for _ in range(ROUNDS):
            own = await self.read_grant(claim.name, claim.holder, until)
            if own is None or own.mode is Mode.PERMITS:
                return False
            if await self._write(own, extended(own._replace(weight=claim.weight), claim.ttl), until):
                await self._serve(claim.name, until)
                return True
        raise _too_busy(claim.name)

    async def release(self, name: str, holder: str, until: float) -> bool:
        left_queue = False
        for lost_races in range(ROUNDS):
            state = await self._read(name, until, lost_races, holder)
            tickets = state.children.starting(waiter_prefix(holder))
            own = state.grant_of(holder)
            if tickets:
                await self._session.requests([_deletion(path) for path in tickets], until)
                left_queue = True
            elif own is None:
                if left_queue:
                    await self._serve(name, until)
                return False
            elif await self._end(state, own, until):
                return True
        raise _too_busy(name)

    async def _end(self, state: State, held: Node, until: float) -> bool:
        """End the grant, and hand the lock off in the same transaction. False after a lost race."""
        plan = await self._plan(state, until, ended=held)
        if await self._change(state, plan, until, [held]) is None:
            return False
        if len(state.children.grants) > 1 or any(new.claim.weight for new in plan.new):
            await self._serve(state.children.name, until)
        return True

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        for lost_races in range(ROUNDS):
            state = await self._read(name, until, lost_races)
            held = next((node for node in state.grants if clean(node.holder) == holder), None)
            if held is None:
                return False
            if await self._end(state, held, until):
                return True
        raise _too_busy(name)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        for lost_races in range(ROUNDS):
            state = await self._read(claim.name, until, lost_races)
            own, old = state.grant_of(claim.holder), state.grant_of(old_holder)
            if own is not None:
                if await self._write(own, extended(own, claim.ttl), until):
                    return Granted(own.created_by, slots=own.slots)
                continue
            if old is None or old.mode is not claim.mode:
                return None
            granted = await self._change(state, Plan([self._new_grant(claim, old.slots)], []), until, [old])
            if granted is not None:
                return granted[claim.holder]
        raise _too_busy(claim.name)

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await self._info(name, until, MOST_HOLDERS)

    async def _info(self, name: str, until: float, most_holders: int) -> LockInfo:
        state = await self._read(name, until)
        order, now_ms, decode = state.children.waiters, state.now_ms, values.Owner.decode
        found = await self._nodes(order[:MOST_WAITERS], until)
        waiters = tuple(
            values.waiter_info(
                node.claim(name)._replace(holder=clean(node.holder)), decode(node.owner), node.age(now_ms)
            )
            for node in found
            if not node.is_expired(now_ms)
        )
        holders = tuple(
            values.HolderInfo(
                clean(node.holder),
                decode(node.owner),
                node.created_by,
                node.age(now_ms),
                None if node.ends_at_ms is None else (node.ends_at_ms - now_ms) / 1000,
                node.mode,
                node.slots,
            )
            for node in state.grants
        )
        fence = holders[-1].fence if holders else None
        return LockInfo(name, holders[:most_holders], fence, waiters, len(waiters) + max(0, len(order) - MOST_WAITERS))

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        children = await self._session.request(lambda client: client.get_children_async(ROOT), until) or []
        names = sorted(unquote(child[1:]) for child in children if child.startswith("="))
        rest = [name for name in names if name > cursor]
        part = rest[:PAGE]
        infos = [await self._info(name, until, LISTED_HOLDERS) for name in part if fits(name, pattern)]
        used = tuple(info._replace(waiters=()) for info in infos if info.locked or info.waiting)
        return Page(used, part[-1] if len(rest) > PAGE else "")

    async def facts(self, until: float) -> Facts:
        await self._nodes_and_time((), until)
        return Facts("zookeeper", persistence=Persistence.FILE)

    async def cancel_waits(self) -> None:
        self.waits_cancelled = True
        for box in list(self.boxes.values()):
            box.wake()

    async def close(self) -> None:
        await self._session.close()

    def reset(self, *, forked: bool) -> None:
        self.boxes.clear()
        self._session.reset()

    async def has_ticket(self, path: str, until: float, watch: Callable[[Any], None]) -> bool:
        """Whether the ticket exists; if it does, watch it."""
        return await self._session.request(lambda client: client.get_async(path, watch=watch), until) is not None

    async def read_grant(self, name: str, holder: str, until: float) -> Node | None:
        """The live grant of `holder`; None if it has none."""
        children = await self._children(name, until)
        own = children.starting(grant_prefix(holder))
        if not own:
            return None
        return (await self._load(children, until, own)).grant_of(holder)

    async def _read(self, name: str, until: float, lost_races: int = 0, releasing: str = "") -> State:
        """Read a lock. While nobody waits, the release of one holder needs no other grant."""
        if lost_races > 1:  # let other clients finish, instead of disturbing each other
            await self._runtime.sleep(self._runtime.random() * min(2**lost_races, MOST_PAUSE_MS) / 1000)
        children = await self._children(name, until)
        own = children.starting(grant_prefix(releasing)) if releasing and not children.waiters else children.grants
        return await self._load(children, until, own)

    async def _children(self, name: str, until: float) -> Children:
        folder = lock_path(name)
        while True:
            found = await self._session.request(
                lambda client: client.get_children_async(folder, include_data=True), until
            )
            if found is None:
                return Children(name)
            children = Children.of(name, found[1].version, found[0])
            if children.ids:
                return children
            # Another program deleted it, or created the lock's node.
            await self._session.request(lambda client: client.create_async(f"{folder}/id:{self._random()}"), until)

    async def _load(self, children: Children, until: float, grants: Sequence[str]) -> State:
        if not children.ids:
            return State(children, [], [], 0)
        nodes, now_ms = await self._nodes_and_time(grants, until)
        nodes.sort(key=lambda node: node.created_by)
        expired = [node for node in nodes if node.is_expired(now_ms)]
        return State(children, [node for node in nodes if not node.is_expired(now_ms)], expired, now_ms)

    async def _nodes(self, paths: Sequence[str], until: float) -> list[Node]:
        """Read nodes; those that have been deleted are left out."""
        replies = await self._session.requests([_reading(path) for path in paths], until) if paths else []
        return [Node.of(path, *reply) for path, reply in zip(paths, replies, strict=True) if reply is not None]

    async def _nodes_and_time(self, paths: Sequence[str], until: float) -> tuple[list[Node], int]:
        """Read nodes, and then ZooKeeper's time in milliseconds: the timestamp of a write."""
        sends = [*map(_reading, paths), lambda client: client.set_async(ROOT, b"")]
        while (replies := await self._session.requests(sends, until))[-1] is None:
            await self._session.request(lambda client: client.ensure_path_async(ROOT), until)
        *found, stat = replies
        return [Node.of(path, *each) for path, each in zip(paths, found, strict=True) if each], int(stat.mtime)

    async def _write(self, held: Node, data: bytes, until: float) -> bool:
        """Write the node of a grant, which restarts its ttl. False if it has changed or ended."""
        return (
            await self._session.request(lambda client: client.set_async(held.path, data, held.version), until)
            is not None
        )

    async def _transact(self, changes: Sequence[Callable[[Any], None]], until: float) -> list[list[Any] | None]:
        """Execute each of the transactions completely or not at all. A reply is None after a lost race."""

        def sending(change: Callable[[Any], None]) -> Callable[[Any], Any]:
            def send(client: Any) -> Any:
                transaction = client.transaction()
                change(transaction)
                return transaction.commit_async()

            return send

        replies = await self._session.requests(list(map(sending, changes)), until)
        results = [None if any(isinstance(one, Exception) for one in reply) else reply for reply in replies]
        if results[0] is None:
            await self._session.request(lambda client: client.ensure_path_async(ROOT), until)
        return results


def add_grant(transaction: Any, new: NewGrant) -> None:
    """Create the grant's node and delete its ticket. The result of the last operation has the node's fence."""
    data = node_data(new.claim, new.slots)
    transaction.create(new.path, data)
    if new.ticket is not None:
        transaction.delete(new.ticket)
    transaction.set_data(new.path, data)


def _reading(path: str) -> Callable[[Any], Any]:
    return lambda client: client.get_async(path)


def _deletion(path: str, version: int = ANY_VERSION) -> Callable[[Any], Any]:
    return lambda client: client.delete_async(path, version)


def _too_busy(name: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"The lock {shown(name)} changed too often to be read. The request may or may not have been executed. Try "
        "again.",
        outcome=Outcome.UNKNOWN,
    )
