"""The body of an `async with` ends when its lease is lost, as `asyncio.timeout` ends one on time. Loaded only where
asyncio is used.

While a body runs, its lease has in `_cancelling` how often its task had been told to end before that, and it is -1
otherwise; `_cancelled` says that we told the task to end. Rules kept here:

- A body is never told from inside itself: a task that cancels itself would meet that in its clean-up.
- A loss may be found in another thread, which looked at the lease for the body, and just as the body ends: so what is
  done about it is decided in the event loop, where bodies end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from lockfast.client.lease import BaseLease
from lockfast.core.lease_state import ALIVE


def open_scope(lease: BaseLease) -> None:
    """The body of a block begins; of blocks that share a lease, the first does it for all."""
    lease_state = lease._lease_state
    task: Any = lease_state.caller  # as `_task` says, without a call: every block comes by here
    lease._cancelling = 0 if task is None else task.cancelling()
    if lease_state.state not in ALIVE:  # lost before it had a scope
        end_soon(lease)


def end_soon(lease: BaseLease) -> None:
    """The lease is lost."""
    task = _task(lease)
    try:
        if task is not None:
            task.get_loop().call_soon_threadsafe(_cancel, lease, task)
    except RuntimeError:
        pass  # the loop is closed, and with it the body


def _task(lease: BaseLease) -> asyncio.Task[Any] | None:
    """Who got the lease. Perhaps not an instance of that class: a loop may make tasks of another."""
    return lease._lease_state.caller  # type: ignore[return-value]


def _cancel(lease: BaseLease, task: asyncio.Task[Any]) -> None:
    if lease._cancelling >= 0 and not lease._cancelled:
        lease._cancelled = True
        task.cancel("the lease was lost")


def close_scope(lease: BaseLease, error: BaseException | None) -> bool:
    """The body that we told to end has ended; True when `error` is that cancellation, and nobody else asked for one."""
    before, lease._cancelling, lease._cancelled = lease._cancelling, -1, False
    task = _task(lease)
    return task is not None and task.uncancel() <= before and isinstance(error, asyncio.CancelledError)
