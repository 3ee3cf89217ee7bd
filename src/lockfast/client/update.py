"""`locks.update(key, change)`: change a value optimistically, and under a lock while conflicts are frequent.

    mode          becomes         when
    OPTIMISTIC    LOCKING         contention rises to `LOCK_AT`: a conflict adds one, a change without one takes one
    LOCKING       OPTIMISTIC      contention falls to 0: a free lock takes one, a taken lock adds one

Rules:

- WATCH keeps every change atomic, also under the lock: a lost lock costs time and no change, and clients that change
  the value without lockfast are noticed too.
- The two thresholds differ, so that the mode does not flicker. Contention is bounded, so that it is soon forgotten.
- Attempts are limited in number and time. Each conflict is followed by a random pause that grows, so that clients that
  lost together do not come back together. Too many conflicts raise `UpdateConflict`, and nothing was written.
- `change` may be called several times, so it must only compute. Its error passes through, and nothing was written.
  None leaves the value unchanged.
- A write without an answer is not repeated: `StoreUnavailable` with an unknown outcome.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lockfast.client.lease import BaseLease
from lockfast.client.lock import BaseLock
from lockfast.client.session import Session
from lockfast.core.retry import retry
from lockfast.errors import ConfigurationError, LockError, UpdateConflict, shown
from lockfast.values import Seconds, lock_name, seconds

Value = bytes | str | int | float
V = TypeVar("V", bound=Value | None)

LOCK_TTL = 10.0
LOCK_AT = 4
MOST_CONTENTION = 12
FIRST_PAUSE = 0.0005
LONGEST_PAUSE = 0.05
MOST_KEYS = 1000
"""Keys whose contention one session remembers."""


class Contention:
    """How often one client recently met conflicts on one value."""

    def __init__(self) -> None:
        self._level = 0
        self.locking = False

    def conflict(self) -> None:
        """Another client changed the value in between, or held the lock."""
        self._level = min(MOST_CONTENTION, self._level + 1)
        if self._level >= LOCK_AT:
            self.locking = True

    def no_conflict(self) -> None:
        self._level = max(0, self._level - 1)
        if self._level == 0:
            self.locking = False


_contention: WeakKeyDictionary[Session, dict[str, Contention]] = WeakKeyDictionary()


def _contention_of(session: Session, key: str) -> Contention:
    known = _contention.setdefault(session, {})
    found = known.get(key)
    if found is None:
        if len(known) >= MOST_KEYS:
            known.pop(next(iter(known)), None)
        found = known.setdefault(key, Contention())
    return found


def conflict_pause(conflicts: int, random: float) -> float:
    """Return the seconds to pause after that many conflicts in a row; `random` is from 0 up to 1.

    >>> conflict_pause(1, 0.5), conflict_pause(3, 1.0), conflict_pause(50, 1.0)
    (0.00025, 0.002, 0.05)
    """
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(conflicts - 1, 16)) * random


def encoded(value: Value) -> bytes:
    """Return a value as the server stores it.

    >>> encoded("ü"), encoded(7), encoded(0.5)
    (b'\\xc3\\xbc', b'7', b'0.5')
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigurationError(f"A value is bytes, text or a number, not {shown(value)}; nothing was written.")
    return str(value).encode()


class Update:
    """One change under way. `lock` guards it while conflicts are frequent."""

    def __init__(
        self,
        lock: BaseLock[Any],
        key: str,
        change: Callable[[bytes | None], Any],
        attempts: object,
        timeout: Seconds,
        adaptive: object,
    ) -> None:
        if not isinstance(attempts, int) or isinstance(attempts, bool) or attempts < 1:
            raise ConfigurationError(f"attempts must be a whole number of at least 1, not {shown(attempts)}.")
        if not isinstance(adaptive, bool):
            raise ConfigurationError(f"adaptive must be True or False, not {shown(adaptive)}.")
        patience = seconds(timeout, "timeout")
        session = lock._session
        session.ensure_open()
        if not session.store.capabilities.values:
            raise ConfigurationError(
                f"{session.address} holds locks and no values, so there is nothing to update. Use a single Redis or "
                "Valkey server."
            )
        self._session = session
        self._lock = lock
        self._key = lock_name(key)
        self._change = change
        self._attempts = attempts
        self._adaptive = adaptive
        self._give_up_at = session.runtime.now() + patience
        self._contention = _contention_of(session, key)
        self._conflicts = 0

    async def run(self) -> Any:
        """Return the result of `change` once it is written."""
        runtime = self._session.runtime
        while True:
            if self._adaptive and self._contention.locking:
                written, value = await self._attempt_locked()
            else:
                written, value = await self._attempt()
                if written and not self._conflicts:
                    self._contention.no_conflict()
            if written:
                return value
            self._conflicts += 1
            self._contention.conflict()
            left = self._give_up_at - runtime.now()
            if self._conflicts >= self._attempts or left <= 0:
                raise self._conflict_error()
            await runtime.sleep(min(left, conflict_pause(self._conflicts, runtime.random())))

    async def _attempt(self) -> tuple[bool, Any]:
        """Read, change and write. Return whether there was no conflict, and the result of `change`."""
        session = self._session
        watched = await retry(
            session.runtime, lambda until: session.store.watch(self._key, until), session.store_timeout
        )
        try:
            result = self._change(watched.value)
            value = await result if isinstance(result, Awaitable) else result
            new = None if value is None else encoded(value)
        except BaseException:
            watched.abandon()
            raise
        if new is None:
            watched.abandon()
            return True, value
        return await watched.commit(new, session.runtime.now() + session.store_timeout), value

    async def _attempt_locked(self) -> tuple[bool, Any]:
        lease: BaseLease | None = await self._lock._acquire(False, None)
        if lease is not None:
            self._contention.no_conflict()
        else:
            self._contention.conflict()
            lease = await self._lock._acquire(True, max(0.0, self._give_up_at - self._session.runtime.now()))
        if lease is None:
            raise self._conflict_error()
        try:
            return await self._attempt()
        finally:
            try:
                await lease._release()
            except LockError:
                pass  # the change is decided by WATCH; the release continues in the background

    def _conflict_error(self) -> UpdateConflict:
        return UpdateConflict(
            f"Other clients changed the value of {shown(self._key)} during each of {self._conflicts} attempts, or held "
            "its lock; nothing was written. Try again later, or allow more attempts or time.",
            key=self._key,
            attempts=self._conflicts,
        )
