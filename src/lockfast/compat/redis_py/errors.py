"""Errors that are redis-py's and lockfast's at once, so that handlers for either catch them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis.exceptions as theirs

from lockfast import errors as ours


class LockError(theirs.LockError, ours.LockError):
    """`redis.exceptions.LockError`."""

    def __init__(self, message: str | None = None, lock_name: object = None) -> None:
        super().__init__(message)
        self.lock_name = lock_name  # type: ignore[assignment]


class LockNotOwnedError(LockError, theirs.LockNotOwnedError):
    """`redis.exceptions.LockNotOwnedError`."""


class ConnectionError(ours.StoreUnavailable, theirs.ConnectionError):  # noqa: A001
    """`redis.exceptions.ConnectionError` with lockfast's `outcome`."""

    def __init__(self, message: str, *, outcome: ours.Outcome = ours.Outcome.NOT_DONE) -> None:
        theirs.ConnectionError.__init__(self, message)
        self.outcome = outcome


class NoPermissionError(theirs.NoPermissionError, ours.StoreRefused):
    """`redis.exceptions.NoPermissionError`."""


class ResponseError(theirs.ResponseError, ours.StoreProtocolError):
    """`redis.exceptions.ResponseError`."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise lockfast's store errors as errors of both libraries."""
    try:
        yield
    except ours.StoreUnavailable as error:
        raise ConnectionError(str(error), outcome=error.outcome) from error
    except ours.StoreRefused as error:
        raise NoPermissionError(str(error)) from error
    except ours.StoreProtocolError as error:
        raise ResponseError(str(error)) from error
