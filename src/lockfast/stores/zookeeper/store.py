"""`ports.Store` on ZooKeeper: read a lock's nodes, decide, and write in a transaction that fails if they changed.

Rules kept here: every write checks the version that was read, so a lost race is no answer but another round; time is
ZooKeeper's alone, as it stamps it on a node that is written; a lock is handed on in the step that frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from lockfast.errors import StoreUnavailable
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.zookeeper import nodes
from lockfast.stores.zookeeper.mailbox import ZooKeeperMailbox
from lockfast.stores.zookeeper.nodes import ROOT, Node, holder_path, lock_path, value
from lockfast.stores.zookeeper.session import Session
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Queued, Renewal, Taken, clean, fits, shown

ROUNDS = 50
"""How often an operation starts anew because others were quicker; each time somebody got on."""
MOST_SHOWN = 200
PAGE = 50


class ZooKeeperStore(Store):
    """`boxes` has the mailbox of every acquisition that waits."""

    grace = 0.3
    capabilities = Capabilities()

    def __init__(self, session: Session, runtime: Runtime) -> None:
        self._session = session
        self._errors = session.errors
        self._runtime = runtime
        self.boxes: dict[str, ZooKeeperMailbox] = {}

    def mailbox(self, holder: str) -> Mailbox:
        box = ZooKeeperMailbox(self, self._runtime, holder)
        self.boxes[holder] = box
        return box

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        for _ in range(ROUNDS):
            held = await self.holder_of(claim.name, until)
            if held is not None and held.holder == claim.holder:
                if await self._prolong(held, claim.ttl, until):
                    return Granted(held.made_by)
                continue
            now_ms = await self._clock(until)
            if held is None or held.is_over(now_ms):
                await self._hand_on(claim.name, held, now_ms, until, claim)
                continue
            left = held.left_ms(now_ms)
            ttl_left = None if left is None else left / 1000
            if enqueue is None:
                return Taken(ttl_left)
            queued = await self._join(claim, enqueue, held, ttl_left, until)
            if queued is not None:
                return queued
        raise _too_busy(claim.name)

    async def _join(
        self, claim: Claim, enqueue: Enqueue, held: Node, ttl_left: float | None, until: float
    ) -> Queued | None:
        """Take or refresh our place, and see that the lock was still held then: who frees it later finds us."""
        prefix = nodes.waiter_prefix(claim.name, claim.holder)
        data = value(claim.holder, claim.owner, ceil(claim.ttl * 1000), enqueue.attempt)
        own = next((child for child in await self._waiters(claim.name, until) if _is_at(child, prefix)), None)
        if own is None:
            made = await self._write(
                lambda client: client.create_async(prefix, data, sequence=True, makepath=True), until
            )
            if made is None:
                return None
            own = made.rpartition("/")[2]
        stat = await self._write(lambda client: client.set_async(f"{lock_path(claim.name)}/{own}", data), until)
        still = await self.holder_of(claim.name, until)
        if stat is None or still is None or still.made_by != held.made_by:
            return None
        box = self.boxes.get(claim.holder)
        if box is not None:
            box.name, box.attempt, box.written_by = claim.name, enqueue.attempt, stat.mzxid
        order = await self._waiters(claim.name, until)
        return Queued(nodes.number_of(own), order.index(own) if own in order else 0, ttl_left)

    async def _hand_on(self, name: str, over: Node | None, now_ms: int, until: float, asker: Claim | None) -> bool:
        """Give a lock that is free, or whose holder's time is over, to who waits first, else to the asker. True if the
        lock changed."""
        for child in await self._waiters(name, until):
            waiter = await self._node(f"{lock_path(name)}/{child}", until)
            if waiter is None:
                continue
            if waiter.is_over(now_ms) and (asker is None or waiter.holder != asker.holder):
                await self._delete(waiter.path, until)
                continue
            data = value(waiter.holder, waiter.owner, waiter.ttl_ms)
            return await self._replace(name, over, data, waiter, until)
        if asker is None:
            return await self._replace(name, over, None, None, until)
        return await self._replace(name, over, value(asker.holder, asker.owner, ceil(asker.ttl * 1000)), None, until)

    async def _replace(
        self, name: str, over: Node | None, data: bytes | None, waiter: Node | None, until: float
    ) -> bool:
        """In one transaction: the old holder out, the new one in, and its place gone."""

        def send(client: Any) -> Any:
            change = client.transaction()
            if over is not None:
                change.delete(over.path, over.version)
            if data is not None:
                change.create(holder_path(name), data)
            if waiter is not None:
                change.delete(waiter.path, waiter.version)
            return change.commit_async()

        if over is None:
            await self._write(lambda client: client.ensure_path_async(lock_path(name)), until)
        results = await self._session.request(send, until)
        return not any(isinstance(result, Exception) for result in results)

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        return [await self._renew(line, until) for line in renewals]

    async def _renew(self, line: Renewal, until: float) -> bool:
        for _ in range(ROUNDS):
            held = await self.holder_of(line.name, until)
            if held is None or held.holder != line.holder:
                return False
            if held.is_over(await self._clock(until)):
                return False
            if await self._prolong(held, line.ttl, until, final=line.final):
                return True
        raise _too_busy(line.name)

    async def _prolong(self, held: Node, ttl: float, until: float, *, final: bool = False) -> bool:
        """Begin the ttl anew. Never shorter than it was, but for a last word."""
        ttl_ms = ceil(ttl * 1000)
        data = held.with_ttl(ttl_ms if final else max(held.ttl_ms, ttl_ms))
        return await self._write(lambda client: client.set_async(held.path, data, held.version), until) is not None

    async def release(self, name: str, holder: str, until: float) -> bool:
        self.boxes.pop(holder, None)
        released = await self._free(name, holder, until)
        prefix = nodes.waiter_prefix(name, holder)
        if not released:
            for child in await self._waiters(name, until):
                if _is_at(child, prefix):
                    await self._delete(f"{lock_path(name)}/{child}", until)
        await self._delete(lock_path(name), until)  # stays while anything is below it
        return released

    async def _free(self, name: str, holder: str, until: float) -> bool:
        for _ in range(ROUNDS):
            held = await self.holder_of(name, until)
            now_ms = 0 if held is None else await self._clock(until)
            if held is None or held.holder != holder or held.is_over(now_ms):
                return False
            if await self._hand_on(name, held, now_ms, until, None):
                return True
        raise _too_busy(name)

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        held = await self.holder_of(name, until)
        if held is None or clean(held.holder) != holder:
            return False
        return await self._free(name, held.holder, until)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        for _ in range(ROUNDS):
            held = await self.holder_of(claim.name, until)
            if held is not None and held.holder == claim.holder and await self._prolong(held, claim.ttl, until):
                return Granted(held.made_by)
            if held is None or held.holder != old_holder or held.is_over(await self._clock(until)):
                return None
            await self._replace(claim.name, held, value(claim.holder, claim.owner, ceil(claim.ttl * 1000)), None, until)
        raise _too_busy(claim.name)

    async def inspect(self, name: str, until: float) -> LockInfo:
        now_ms = await self._clock(until)
        order = await self._waiters(name, until)
        found = [await self._node(f"{lock_path(name)}/{child}", until) for child in order[:MOST_SHOWN]]
        alive = [node for node in found if node is not None and not node.is_over(now_ms)]
        waiting = {
            "waiters": tuple(nodes.waiter_info(node, now_ms) for node in alive),
            "waiting": len(alive) + max(0, len(order) - MOST_SHOWN),
        }
        held = await self.holder_of(name, until)
        if held is None or held.is_over(now_ms):
            return LockInfo(name, **waiting)  # type: ignore[arg-type]
        left = held.left_ms(now_ms)
        return LockInfo(
            name,
            holder=clean(held.holder),
            owner=held.told,
            fence=held.made_by,
            held_for=max(0, now_ms - held.made_at_ms) / 1000,
            ttl_left=None if left is None else left / 1000,
            **waiting,  # type: ignore[arg-type]
        )

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        names = sorted(nodes.name_in(child) for child in await self._children(ROOT, until) if child.startswith("="))
        rest = [name for name in names if name > cursor]
        part = rest[:PAGE]
        infos = [await self.inspect(name, until) for name in part if fits(name, pattern)]
        held = tuple(info._replace(waiters=()) for info in infos if info.locked or info.waiting)
        return Page(held, part[-1] if len(rest) > PAGE else "")

    async def facts(self, until: float) -> Facts:
        await self._clock(until)
        return Facts("zookeeper", persistence=Persistence.FILE)

    def on_change(self, tell: Callable[[str | None], None]) -> None:
        """A theft is noticed at the next renewal."""

    def listen(self) -> None:
        """Nothing comes unasked."""

    def disconnect(self) -> None:
        """Left to its client library, and to `close`."""

    async def cancel_waits(self) -> None:
        """Who waits is sent away by `close`, and what it is given until then goes back as all else does."""

    async def close(self) -> None:
        await self._session.close()

    def reset(self, *, forked: bool) -> None:
        self.boxes.clear()
        self._session.reset()

    async def holder_of(self, name: str, until: float, watch: Callable[[Any], None] | None = None) -> Node | None:
        return await self._node(holder_path(name), until, watch)

    async def _node(self, path: str, until: float, watch: Callable[[Any], None] | None = None) -> Node | None:
        try:
            data, stat = await self._session.request(lambda client: client.get_async(path, watch=watch), until)
        except self._errors.NoNodeError:
            return None
        return Node.of(path, data, stat)

    async def _children(self, path: str, until: float) -> list[str]:
        try:
            return list(await self._session.request(lambda client: client.get_children_async(path), until))
        except self._errors.NoNodeError:
            return []

    async def _waiters(self, name: str, until: float) -> list[str]:
        return nodes.in_order(await self._children(lock_path(name), until))

    async def _clock(self, until: float) -> int:
        """ZooKeeper's time in milliseconds: what it stamps on a write."""
        stat = await self._write(lambda client: client.set_async(ROOT, b""), until)
        if stat is None:
            await self._write(lambda client: client.ensure_path_async(ROOT), until)
            stat = await self._session.request(lambda client: client.set_async(ROOT, b""), until)
        return int(stat.mtime)

    async def _delete(self, path: str, until: float) -> None:
        await self._write(lambda client: client.delete_async(path), until)

    async def _write(self, send: Callable[[Any], Any], until: float) -> Any:
        """What the write gave; None when others were quicker."""
        quicker = (self._errors.NoNodeError, self._errors.NodeExistsError, self._errors.BadVersionError)
        try:
            return await self._session.request(send, until)
        except (*quicker, self._errors.NotEmptyError):
            return None


def _is_at(child: str, prefix: str) -> bool:
    return child.startswith(prefix.rpartition("/")[2])


def _too_busy(name: str) -> StoreUnavailable:
    return StoreUnavailable(f"The lock {shown(name)} changed hands too often to be read. Nothing was changed.")
