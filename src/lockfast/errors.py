"""The errors of lockfast, as a tree.

    LockError
    ├── AcquireTimeout (TimeoutError)         the lock stayed taken for the whole timeout
    ├── LeaseLost                             the lease ended before its holder released it
    ├── NotHeld (RuntimeError)                this caller holds no lease to release or renew
    ├── WouldDeadlock (RuntimeError)          this caller would wait for itself
    ├── StaleFence                            a write was refused: a later holder has written
    ├── UpdateConflict                        a value changed during every attempt to change it
    ├── ConfigurationError (ValueError)       a value or a set-up that cannot work; nothing was changed
    └── StoreError
        ├── StoreUnavailable (ConnectionError)  no usable answer; `outcome` says what is known
        │   └── QuorumNotReached                too few servers answered; `votes` has each answer
        ├── StoreRefused (PermissionError)      the account lacks a permission
        └── StoreProtocolError                  an answer that a healthy store would not give

Rules: every error pickles (a message, then plain attributes). Its message says what happened, what that means for the
lock, and what to do. It never contains a password.
"""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """Whether a request without a usable answer may have been executed.

    >>> Outcome.UNKNOWN.value
    'unknown'
    """

    NOT_DONE = "not done"
    UNKNOWN = "unknown"


class LockError(Exception):
    """The base class of all errors of lockfast.

    >>> issubclass(AcquireTimeout, LockError)
    True
    """


class AcquireTimeout(LockError, TimeoutError):
    """The lock stayed taken for the whole timeout; nothing was left behind.

    >>> error = AcquireTimeout("taken", name="report", timeout=2.0)
    >>> error.name, error.timeout
    ('report', 2.0)
    """

    def __init__(self, message: str, *, name: str | None = None, timeout: float | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.timeout = timeout


class LeaseLost(LockError):
    """The lease ended before its holder released it: later writes may collide with those of another holder.

    >>> LeaseLost("gone", name="report", fence=7).fence
    7
    """

    def __init__(self, message: str, *, name: str | None = None, fence: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.fence = fence


class NotHeld(LockError, RuntimeError):
    """A release or a renewal by a caller that holds no lease.

    >>> raise NotHeld("acquire first")
    Traceback (most recent call last):
    lockfast.errors.NotHeld: acquire first
    """


class WouldDeadlock(LockError, RuntimeError):
    """The caller asked for a lock that it could get only after it releases one that it holds. Nothing was sent.

    >>> import lockfast
    >>> rwlock = lockfast.connect("memory://").rwlock("doc:would-deadlock")
    >>> with rwlock.reader:  # doctest: +ELLIPSIS
    ...     rwlock.writer.acquire()
    Traceback (most recent call last):
    lockfast.errors.WouldDeadlock: This thread or task already reads 'doc:would-deadlock'...
    """


class StaleFence(LockError):
    """A write was refused because a later holder of the lock has written; nothing was changed.

    >>> error = StaleFence("refused", name="file:9527", fence=7, newest=8)
    >>> error.fence, error.newest
    (7, 8)
    """

    def __init__(
        self, message: str, *, name: str | None = None, fence: int | None = None, newest: int | None = None
    ) -> None:
        super().__init__(message)
        self.name = name
        self.fence = fence
        self.newest = newest


class UpdateConflict(LockError):
    """The value changed during every attempt to change it; nothing was written.

    >>> UpdateConflict("too busy", key="stock:7", attempts=100).attempts
    100
    """

    def __init__(self, message: str, *, key: str | None = None, attempts: int | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.attempts = attempts


class ConfigurationError(LockError, ValueError):
    """A value or a set-up that cannot work; nothing was changed in a store.

    >>> import lockfast
    >>> lockfast.connect("memory://").lock("")
    Traceback (most recent call last):
    lockfast.errors.ConfigurationError: A lock's name must not be empty.
    """


def closed_error() -> ConfigurationError:
    """The error of a closed connection."""
    return ConfigurationError("This connection was closed; nothing was sent. Call connect() again.")


class StoreError(LockError):
    """The store could not execute a request.

    >>> issubclass(StoreUnavailable, StoreError) and issubclass(StoreRefused, StoreError)
    True
    """


class StoreUnavailable(StoreError, ConnectionError):
    """No usable answer from the store; `outcome` says whether the request may have been executed.

    >>> StoreUnavailable("connection refused").outcome
    <Outcome.NOT_DONE: 'not done'>
    """

    def __init__(self, message: str, *, outcome: Outcome = Outcome.NOT_DONE) -> None:
        super().__init__(message)
        self.outcome = outcome


class QuorumNotReached(StoreUnavailable):
    """Fewer than a majority of a quorum's servers gave a usable answer; `votes` pairs each server with its answer.

    >>> error = QuorumNotReached("1 of 3", votes=(("redis://a:6379/0", "granted"), ("redis://b:6379/0", "no answer")))
    >>> dict(error.votes)["redis://b:6379/0"]
    'no answer'
    """

    def __init__(
        self, message: str, *, votes: tuple[tuple[str, str], ...] = (), outcome: Outcome = Outcome.NOT_DONE
    ) -> None:
        super().__init__(message, outcome=outcome)
        self.votes = votes


class StoreRefused(StoreError, PermissionError):
    """The store knows us and says no: wrong credentials, or a permission that is missing.

    `command` is the server command that was denied, in lower case, if the server names one.

    >>> isinstance(StoreRefused("NOPERM"), PermissionError)
    True
    """

    def __init__(self, message: str, *, command: str = "") -> None:
        super().__init__(message)
        self.command = command


class StoreProtocolError(StoreError):
    """An answer that a healthy store would not give, such as a key that holds other data.

    >>> isinstance(StoreProtocolError("the key holds a hash"), LockError)
    True
    """


def shown(value: object) -> str:
    """Return a short repr that cannot flood or control a terminal.

    >>> shown("x" * 1000)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    try:
        text = ascii(value[:80] if isinstance(value, str | bytes) else value)
    except Exception:  # its repr fails, or the number is too long to print
        text = f"a value of type {ascii(type(value).__name__)[1:-1]}"
    return text if len(text) <= 63 else text[:60] + "..."
