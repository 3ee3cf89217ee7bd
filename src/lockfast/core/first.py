"""What came of a first request that was made in another way, for whoever goes on from there."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Generic, TypeVar, cast, final

T = TypeVar("T")


@final
class First(Generic[T]):
    """Sent at `asked_at`; its outcome is an answer, an error, or what is to be awaited for either. It is told once, and
    forgotten then: an error that hung on here would hang on to the frames that it came through, and they to this."""

    __slots__ = ("_outcome", "sent_at")

    def __init__(self, sent_at: float, outcome: T | BaseException | Awaitable[T]) -> None:
        self.sent_at = sent_at
        self._outcome: T | BaseException | Awaitable[T] | None = outcome

    async def answer(self) -> T:
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome
        return await cast(Awaitable[T], outcome) if hasattr(outcome, "__await__") else cast(T, outcome)
