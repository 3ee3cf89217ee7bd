"""`Lease`: one grant in its holder's hands; the rules once, the two colours below them.

A lease belongs to whoever has the object, in whatever thread or task. Its state follows the local clock even
if nothing is heard from the store, so `ensure_held()` is right in the instant a stopped process runs again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal

from lockfast.client.export import Exported
from lockfast.client.loss import AsyncLost, Lost
from lockfast.core import release as core
from lockfast.core.acquire import Grant
from lockfast.core.lease_state import ALIVE, AT_RISK, LOST, RELEASED, LeaseState, State
from lockfast.core.local_queue import SharedGrant
from lockfast.core.renewal import renew
from lockfast.core.retry import retry
from lockfast.errors import LeaseLost, Outcome, StoreUnavailable
from lockfast.ports import Waker
from lockfast.runtime.runner import run
from lockfast.values import LEAST_TTL, Seconds, clean, seconds, shown

if TYPE_CHECKING:
    from lockfast.client.base_lock import BaseLock
    from lockfast.client.session import BaseLocks

log = logging.getLogger("lockfast")

Callback = Callable[["BaseLease"], Awaitable[Any] | Any]


class BaseLease:
    """What a lease is in both colours."""

    __slots__ = (
        "__weakref__",
        "_cancelled",
        "_cancelling",
        "_client",
        "_generation",
        "_home",
        "_keep_until",
        "_lease_state",
        "_left",
        "_local_queue",
        "_options",
        "_origin",
        "_shared_grant",
        "_wakers",
    )

    # Set by `_begin`, and not before: until then nobody has the lease, though an error report may show it.
    _generation: int
    _shared_grant: SharedGrant | None

    def __init__(self, lock: BaseLock[Any]) -> None:
        """Of nothing yet, until `_begin`."""
        client, chosen = lock._client, lock._options
        self._client: BaseLocks[Any] = client
        self._lease_state = LeaseState(client.runtime, chosen.renew, chosen.max_hold)
        self._options = chosen
        self._origin = lock._origin  # the user's client, if the lock was made on one: it must outlive the lease
        self._local_queue = lock._local_queue  # a room lives as long as its leases do
        self._wakers: list[Waker] = []
        self._home: tuple[dict[Hashable, list[BaseLease]], Hashable] | None = None
        self._left = False  # whether `lock.release()` is to find it no more
        self._keep_until = 0.0  # when given back sooner, the name stays taken until then
        self._cancelling = -1  # of these two, see `scopes.py`
        self._cancelled = False

    def _begin(self, grant: Grant) -> None:
        """The store granted it."""
        client, lease_state, local_queue = self._client, self._lease_state, self._local_queue
        self._generation = client.generation  # now: this process may have been forked while it waited
        self._shared_grant = grant.shared_grant
        lease_state.begin(grant, self._changed)
        if local_queue is not None:
            local_queue.latest = lease_state
        client.keepalive.watch(lease_state)

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._lease_state.name

    @property
    def holder(self) -> str:
        """The unguessable id under which the store knows this lease. Leases that threads or tasks of one connection
        passed to one another share it; their fences differ."""
        return self._lease_state.holder

    @property
    def fence(self) -> int:
        """A number greater than that of every grant before; hand it to the resource that you protect."""
        return self._lease_state.fence

    @property
    def ttl(self) -> float:
        """Seconds for which the store keeps the grant without a renewal."""
        return self._lease_state.ttl

    @property
    def acknowledged(self) -> int | None:
        """How many replicas said that they have the grant too; None when nobody asked them (`connect(replicas=n)`).
        It narrows what a failover can lose, and no more: another replica may take over."""
        return self._lease_state.acknowledged

    @property
    def reasserted(self) -> int:
        """How often a server had forgotten the lease, as after a failover, and it was free and went on."""
        return self._lease_state.reasserted

    @property
    def inherited(self) -> bool:
        """True in a process that was forked from the holder: it holds nothing."""
        return self._generation != self._client.generation

    @property
    def state(self) -> State:
        """Held, at risk, lost or released, by the local clock."""
        client = self._client
        if self._generation != client.generation:  # inherited
            return LOST
        lease_state, now = self._lease_state, client.runtime.now()
        return lease_state.state if now < lease_state.valid_until else lease_state.check(now)

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is surely ours without another renewal; 0 when it is not ours."""
        if self.state not in ALIVE:
            return 0.0
        return max(0.0, self._lease_state.valid_until - self._client.runtime.now())

    def __bool__(self) -> Literal[True]:
        """A lease is true, whatever became of it: `if lease := lock.acquire(timeout=0)` asks whether there is one."""
        return True

    def ensure_held(self) -> None:
        """Raise `LeaseLost` unless the lease is still ours. Asks nobody, so it costs next to nothing."""
        state = self.state
        if state is LOST:
            raise self._lost_error()
        if state is RELEASED:
            raise LeaseLost(
                f"The lease on {shown(self.name)} was given back already: the lock may be another's. "
                "Acquire it again before you go on.",
                name=self.name,
                fence=self.fence,
            )

    def _lost_error(self) -> LeaseLost:
        why = "this process was forked from its holder" if self.inherited else self._lease_state.reason
        return LeaseLost(
            f"The lease on {shown(self.name)} was lost: {why}. Another may hold the lock now, so treat what you "
            "did since as unprotected: check it by its fence, or do it again under a new lease.",
            name=self.name,
            fence=self.fence,
        )

    def _changed(self, state: State) -> None:
        if state is LOST:
            log.warning(
                "The lease on %s (fence %d) was lost: %s", shown(self.name), self.fence, self._lease_state.reason
            )
            for waker in tuple(self._wakers):
                waker.wake()
            if self._cancelling >= 0:
                from lockfast.client.cancel_scope import end_soon  # loaded by whoever has set `_cancelling`

                end_soon(self)
            self._end_tenancy()
        callback = {AT_RISK: self._options.on_risk, LOST: self._options.on_lost}.get(state)
        if callback is not None:
            # In a thread or task of its own: never inside an operation of the caller's, nor the keeper's.
            self._client.callbacks.add(lambda: self._call(callback))

    async def _call(self, callback: Callback) -> None:
        try:
            result = callback(self)
            if hasattr(result, "__await__"):
                await result
        except BaseException as error:
            if self._ends_us_too(error):
                raise
            log.exception("A callback of the lease on %s failed.", shown(self.name))

    def _ends_us_too(self, error: BaseException) -> bool:
        """Whether what a callback raised is meant for the thread or task that called it."""
        return not isinstance(error, Exception)

    def _leave_home(self) -> None:
        """The lock object that handed this lease out need not remember it any more."""
        self._left = True
        home, self._home = self._home, None
        if home is None:
            return
        table, caller = home
        leases = table.get(caller, [])
        try:
            leases.remove(self)
        except ValueError:
            return  # another thread gives the same lease back
        if not leases:
            table.pop(caller, None)

    async def _release(self) -> bool:
        """Give the lease back; False when it had gone already. May be called again after an error. With what came of a
        `first` request, go on from there."""
        return await self._give_back(self.state)

    async def _give_back(self, state: State) -> bool:
        """The same for a caller that has just looked at the state."""
        lease_state, client = self._lease_state, self._client
        again = released = False
        if state not in ALIVE:
            if self._generation != client.generation:
                log.debug("A forked process does not give back its parent's lease on %s.", shown(self.name))
                return False
            again = state is RELEASED and not lease_state.settled  # an earlier call failed, and its clean-up goes on
        elif self._shared_grant is not None and self._pass_on(self._shared_grant):
            return True
        ours = lease_state.give_back() or again
        # If settled, another gave it back meanwhile, perhaps to one who holds it now under the same id. If not, and not
        # ours, it was lost, and its key may still be there.
        if ours or not lease_state.settled:
            if (
                self._shared_grant is not None
            ):  # first, so that who asks next does so right behind the release, as a rule
                self._shared_grant.end()
            keep_until = self._keep_until if ours else 0.0
            released = await core.release(
                client.store,
                client.runtime,
                lease_state.name,
                lease_state.holder,
                lease_state.ttl,
                ours,
                again,
                keep_until,
            )
            lease_state.settled = True
            client.keepalive.unwatch(lease_state)
            released = released and ours  # a lease that was lost before stays lost, though its key was still there
        self._left = True
        if self._home is not None:
            self._leave_home()
        if not released:
            self._warn_gone()
        return released

    def _pass_on(self, shared_grant: SharedGrant) -> bool:
        """Whether another thread or task of this connection has it now."""
        client = self._client
        now = client.runtime.now()
        if now < self._keep_until or self._generation != client.generation:
            return False
        if not shared_grant.local_queue.pass_on(shared_grant, self._lease_state, now):
            return False
        client.keepalive.unwatch(self._lease_state)
        self._left = True
        if self._home is not None:
            self._leave_home()
        return True

    def _end_tenancy(self) -> None:
        """Those who wait in this process for the lock to be passed to them are to ask the store."""
        if self._shared_grant is not None:
            self._shared_grant.end()

    def _warn_gone(self) -> None:
        log.warning(
            "The lease on %s (fence %d) had already gone when it was given back.",
            shown(self.name),
            self.fence,
        )

    async def _renew(self, ttl: float | None) -> None:
        """Prolong the lease now, and with `ttl` renew it by that from now on; `LeaseLost` when it is gone."""
        self.ensure_held()
        client, lease_state = self._client, self._lease_state
        client.ensure_open()
        if ttl is not None:
            lease_state.change_ttl(client.runtime.now(), ttl)

        async def once(until: float) -> None:
            if await renew(client.store, client.runtime, [lease_state], client.keepalive.refused, until):
                raise StoreUnavailable("The renewal was not answered; it may be tried again.", outcome=Outcome.UNKNOWN)

        await retry(client.runtime, once, core.BUDGET)
        client.keepalive.reschedule(lease_state)
        self.ensure_held()

    def export(self) -> str:
        """A string with which `locks.adopt()` takes the lease over, in another thread, process or host.

        From now on this side neither renews nor releases; the taker has `remaining` seconds to adopt. Whoever
        has the string can take the lock, so keep it as you would a password.
        """
        self.ensure_held()
        if not self._lease_state.give_back(to_another=True):
            self.ensure_held()  # another thread gave it back meanwhile: say so
        self._client.keepalive.unwatch(self._lease_state)
        self._leave_home()
        self._end_tenancy()
        return Exported(self.name, self.holder, self.ttl).encode()

    def __repr__(self) -> str:
        if not hasattr(self._lease_state, "fence"):  # an error report may show the locals of an acquisition that failed
            return f"<{type(self).__name__} of nothing yet>"
        return (
            f"<{type(self).__name__} {clean(self.name)!r} {self.state.value}, fence {self.fence}, "
            f"{self.remaining:.1f} s left>"
        )


class Lease(BaseLease):
    """One grant, for threads.

    >>> import lockfast
    >>> locks = lockfast.connect("memory://")
    >>> lease = locks.lock("doc:lease", ttl=10).acquire()
    >>> lease.state.value, lease.remaining > 9
    ('held', True)
    >>> lease.release()
    True
    """

    __slots__ = ()

    def _ends_us_too(self, error: BaseException) -> bool:
        return False  # sys.exit() ends a thread, and this one has other callbacks to call

    @property
    def lost(self) -> Lost:
        """Set when the lease is lost; `lease.lost.wait(timeout)` blocks until then."""
        return Lost(self)

    def release(self) -> bool:
        """Give the lease back; False, with a warning in the log, when it had gone already."""
        return run(self._release())

    def renew(self, ttl: Seconds | None = None) -> None:
        """Keep the lease for at least its ttl from now; `LeaseLost` when it is no longer ours. A new `ttl` counts for
        this and all further renewals; a shorter one does not take back what was granted before."""
        run(self._renew(None if ttl is None else seconds(ttl, "ttl", least=LEAST_TTL)))


class AsyncLease(BaseLease):
    """One grant, for asyncio: the same names, awaited."""

    __slots__ = ()

    def _ends_us_too(self, error: BaseException) -> bool:
        import asyncio  # here, so that threads need not load it

        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()  # a callback may await what was cancelled; that is its own affair
            return task is None or task.cancelling() > 0
        return super()._ends_us_too(error)

    @property
    def lost(self) -> AsyncLost:
        """Set when the lease is lost; `await lease.lost.wait(timeout)` waits for that."""
        return AsyncLost(self)

    async def release(self) -> bool:
        """Give the lease back; False, with a warning in the log, when it had gone already."""
        return await self._release()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Keep the lease for at least its ttl from now; `LeaseLost` when it is no longer ours. A new `ttl` counts for
        this and all further renewals; a shorter one does not take back what was granted before."""
        await self._renew(None if ttl is None else seconds(ttl, "ttl", least=LEAST_TTL))
