"""Scopes: the `with` blocks that are active on one lock, and the cancellation of an async body on loss.

Rules:

- Each entry of a block has its own scope. A block ends the scope of its own frame, so a generator that holds the lock
  in the same thread keeps its lease. Only a block without a frame of its own (`ExitStack`) ends the innermost scope of
  its thread or task.
- The body of an `async with` is cancelled when its lease is lost, as `asyncio.timeout` does it. A task never cancels
  itself, because it would meet the cancellation in its own clean-up. A loss can be detected in another thread while
  the body ends, so the event loop decides what to do, where bodies end.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockfast.client.lease import BaseLease


class Scope:
    """One `with` block: the caller and the frame that entered it, and its lease.

    `frame` is an id, so that the frame is not kept alive. `_cancelling` is the number of cancellations that the task
    had before the body began; -1 if the body is not cancelled on loss.
    """

    __slots__ = ("_cancelled", "_cancelling", "caller", "frame", "lease")

    def __init__(self, caller: Hashable, frame: int, lease: Any) -> None:
        self.caller = caller
        self.frame = frame
        self.lease = lease
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


def pop_scope(scopes: list[Scope], caller: Hashable, frame: int) -> Scope | None:
    """Remove and return the scope that ends: the innermost of this frame, else of this caller, else of all.

    >>> scopes = [Scope("me", 1, "outer"), Scope("me", 2, "generator"), Scope("you", 3, "yours")]
    >>> pop_scope(scopes, "me", 1).lease, pop_scope(scopes, "me", 9).lease, pop_scope(scopes, "them", 3).lease
    ('outer', 'generator', 'yours')
    """
    seen = tuple(scopes)  # other threads change the list
    for matches in (
        [scope for scope in seen if scope.frame == frame and scope.caller == caller],
        [scope for scope in seen if scope.frame == frame],
        [scope for scope in seen if scope.caller == caller],
        list(seen),
    ):
        if matches:
            scopes.remove(matches[-1])
            return matches[-1]
    return None
