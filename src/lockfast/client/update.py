"""`locks.update(key, change)`: change a value without a lock, again when another came in between, and with a lock when
that happens often.

Rules kept here:

- It is WATCH that keeps every change whole, also under the lock: a lock that is lost costs time and no change, and
  those who change the same value in another way are noticed too.
- Attempts are bounded, in number and in time; each conflict is followed by a random pause that grows. Too many raise
  `UpdateConflict`, and nothing was written.
- `change` may be called several times, so it must do nothing but compute. What it raises passes through, and nothing
  was written; None leaves the value as it is.
- A write that got no answer may have been carried out, and is not repeated: `StoreUnavailable`, outcome unknown.

`core/optimism.py` decides when to go over to the lock, which is called "update:" and the key, and when to come back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from lockfast.core import contention as optimism
from lockfast.core.retry import retry
from lockfast.errors import ConfigurationError, LockError, UpdateConflict
from lockfast.ports import WatchedValue
from lockfast.values import Seconds, lock_name, seconds, shown

if TYPE_CHECKING:
    from lockfast.client.lease import BaseLease
    from lockfast.client.session import BaseLocks

Value = bytes | str | int | float
V = TypeVar("V", bound=Value | None)

LOCK_TTL = 10.0
MOST_HEATS = 1000
"""Values whose heat one connection remembers."""

_heats: WeakKeyDictionary[Any, dict[str, optimism.Heat]] = WeakKeyDictionary()


class Limits(NamedTuple):
    """How long to try; checked when built by `limits()`."""

    attempts: int
    timeout: float
    adaptive: bool


def limits(attempts: object, timeout: Seconds, adaptive: object) -> Limits:
    """The options of `locks.update()`, checked."""
    if not isinstance(attempts, int) or isinstance(attempts, bool) or attempts < 1:
        raise ConfigurationError(f"attempts must be a whole number from 1 on, not {shown(attempts)}.")
    if not isinstance(adaptive, bool):
        raise ConfigurationError(f"adaptive must be True or False, not {shown(adaptive)}.")
    return Limits(attempts, seconds(timeout, "timeout"), adaptive)


def encoded(value: Value) -> bytes:
    """A value as the server keeps it.

    >>> encoded("ü"), encoded(7), encoded(0.5)
    (b'\\xc3\\xbc', b'7', b'0.5')
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigurationError(f"A value is bytes, text or a number, not {shown(value)}; nothing was written.")
    return str(value).encode()


async def update(
    client: BaseLocks[Any],
    key: str,
    change: Callable[[bytes | None], V | Awaitable[V]],
    chosen: Limits,
) -> V:
    """What `change` made of the value, once it is written."""
    client.ensure_open()
    if not client.store.capabilities.values:
        raise ConfigurationError(
            f"{client!r} holds locks and no values, so there is nothing to update. This needs one server of Redis or "
            "Valkey."
        )
    value: V = await _Update(client, lock_name(key), change, chosen).run()
    return value


class _Update:
    """One change under way; `conflicts` counts how often another came in between."""

    def __init__(self, client: BaseLocks[Any], key: str, change: Any, chosen: Limits) -> None:
        self._client = client
        self._key = key
        self._change = change
        self._chosen = chosen
        self._give_up_at = client.runtime.now() + chosen.timeout
        self._heat = _heat_of(client, key)
        self._conflicts = 0

    async def run(self) -> Any:
        runtime = self._client.runtime
        while True:
            if self._chosen.adaptive and self._heat.locking:
                written, value = await self._under_lock()
            else:
                written, value = await self._attempt()
                if written and not self._conflicts:
                    self._heat.undisputed()
            if written:
                return value
            self._conflicts += 1
            self._heat.disputed()
            left = self._give_up_at - runtime.now()
            if self._conflicts >= self._chosen.attempts or left <= 0:
                raise self._conflict()
            await runtime.sleep(min(left, optimism.pause(self._conflicts, runtime.random())))

    async def _attempt(self) -> tuple[bool, Any]:
        """Read, change, write: whether nobody came in between, and what `change` made."""
        draft = await retry(
            self._client.runtime, lambda until: self._client.store.watch(self._key, until), self._client.store_timeout
        )
        try:
            made = self._change(draft.value)
            value = await made if isinstance(made, Awaitable) else made
            new = None if value is None else encoded(value)
        except BaseException:
            draft.abandon()
            raise
        return await self._write(draft, new), value

    async def _write(self, draft: WatchedValue, new: bytes | None) -> bool:
        if new is None:
            draft.abandon()
            return True
        return await draft.commit(new, self._until())

    def _until(self) -> float:
        return self._client.runtime.now() + self._client.store_timeout

    async def _under_lock(self) -> tuple[bool, Any]:
        lock: Any = self._client._lock_class(self._client, f"update:{self._key}", ttl=LOCK_TTL)
        lease: BaseLease | None = await lock._acquire(False, None)
        if lease is not None:
            self._heat.undisputed()
        else:
            self._heat.disputed()
            lease = await lock._acquire(True, max(0.0, self._give_up_at - self._client.runtime.now()))
        if lease is None:
            raise self._conflict()
        try:
            return await self._attempt()
        finally:
            await _give_back(lease)

    def _conflict(self) -> UpdateConflict:
        return UpdateConflict(
            f"The value of {shown(self._key)} was changed by others under each of {self._conflicts} attempts, or their "
            "lock stayed taken; nothing was written. Try again later, or give it more attempts or time.",
            key=self._key,
            attempts=self._conflicts,
        )


async def _give_back(lease: BaseLease) -> None:
    try:
        await lease._release()
    except LockError:
        pass  # the change is done or not, whatever becomes of the lock; the background goes on with it


def _heat_of(client: BaseLocks[Any], key: str) -> optimism.Heat:
    heats = _heats.setdefault(client, {})
    heat = heats.get(key)
    if heat is None:
        if len(heats) >= MOST_HEATS:
            heats.pop(next(iter(heats)), None)
        heat = heats.setdefault(key, optimism.Heat())
    return heat
