"""Scopes: the `with` blocks that are active on one lock, and the cancellation of an async body on loss.

Rules:

- Each entry of a block has its own scope, and a block ends its own: that of its frame, or of its `ExitStack`. So a
  generator that holds the lock in the same thread keeps its lease.
- A context manager of the user may enter the lock in one function and leave it in another. Such a block ends the
  innermost scope of its thread or task, but never that of a generator, of an `ExitStack`, or of a function that is
  still running.
- The body of an `async with` is cancelled when its lease is lost, as `asyncio.timeout` does it. A task never cancels
  itself, because it would meet the cancellation in its own clean-up. A loss can be detected in another thread while
  the body ends, so the event loop decides what to do, where bodies end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockfast.client.lease import BaseLease


_CONTEXTLIB = vars(contextlib)
_GENERATOR = 0x20 | 0x200
"""The flags of generator and async generator functions, as in `inspect`, which is slow to load."""


class Scope:
    """One `with` block: the caller that entered it, its frame or `ExitStack`, and its lease.

    `block` is an id, so that the frame is not kept alive. `_code` is the function that entered the block; None for an
    `ExitStack`. `_cancelling` is the number of cancellations that the task
    had before the body began; -1 if the body is not cancelled on loss.
    """

    __slots__ = ("_cancelled", "_cancelling", "_code", "block", "caller", "lease")

    def __init__(self, caller: Hashable, frame: FrameType, lease: Any) -> None:
        self.caller = caller
        self.block = id(frame)
        self._code: CodeType | None = frame.f_code
        self.lease = lease
        if frame.f_globals is _CONTEXTLIB:
            self.block = block_id(frame)
            self._code = self._code if self.block == id(frame) else None
        self._cancelling = -1
        self._cancelled = False

    def cancel_on_loss(self, lease: BaseLease) -> None:
        """Cancel the body when `lease` is lost."""
        task: Any = self.caller
        self._cancelling = 0 if task is None else task.cancelling()
        lease._watch_loss(self)

    def cancel_body(self) -> None:
        """The lease is lost. May be called from any thread."""
        task: Any = self.caller
        try:
            if task is not None:
                task.get_loop().call_soon_threadsafe(self._cancel)
        except RuntimeError:
            pass  # the event loop is closed, and the body ended with it

    def _cancel(self) -> None:
        if self._cancelling >= 0 and not self._cancelled:
            self._cancelled = True
            task: Any = self.caller
            task.cancel("the lease was lost")

    def end(self, error: BaseException | None) -> bool:
        """The body has ended. True if `error` is the cancellation of `cancel_body()` and nothing else cancelled it."""
        before, self._cancelling = self._cancelling, -1
        if not self._cancelled:
            return False
        import asyncio  # loaded already: the body ran in a task

        task: Any = self.caller
        return task.uncancel() <= before and isinstance(error, asyncio.CancelledError)

    @property
    def ends_itself(self) -> bool:
        """Whether only the block itself can end it: it is an `ExitStack`, or stands in a generator."""
        return self._code is None or bool(self._code.co_flags & _GENERATOR)


def block_id(frame: FrameType) -> int:
    """Identify the block that `frame` enters or leaves.

    The list of an `ExitStack` identifies it: `pop_all()` moves the list to another stack.
    """
    if frame.f_globals is _CONTEXTLIB:
        callbacks = getattr(frame.f_locals.get("self"), "_exit_callbacks", None)
        if callbacks is not None:
            return id(callbacks)
    return id(frame)


def pop_scope(scopes: list[Scope], caller: Hashable, frame: FrameType) -> Scope | None:
    """Remove and return the scope of the block that ends in `frame`; None if there is none."""
    seen = tuple(scopes)  # other threads change the list
    block = block_id(frame)
    found = [scope for scope in seen if scope.block == block]
    if not found:
        others = [scope for scope in seen if not scope.ends_itself]
        running = _running(frame)
        found = [scope for scope in others if scope.block not in running] or others
    found = [scope for scope in found if scope.caller == caller] or found
    if not found:
        return None
    scopes.remove(found[-1])
    return found[-1]


def _running(frame: FrameType | None) -> set[int]:
    """The ids of the frame and its callers."""
    running = set()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    return running
