"""What a virtual process waits with: its traps, its wake-up calls, and the mailbox that pushes come to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from lockfast.values import FirstNotification, GrantNotification

if TYPE_CHECKING:
    from verify.process import Process


class Wait(NamedTuple):
    """What a task waits for; `until` is local time, None for as long as it takes."""

    kind: str  # "reply", "sleep", "wake", "mail", "join" or "work"
    key: Any
    until: float | None


block: Callable[[Wait], Any] | None = None
"""How the running task waits, if it blocks where others suspend (see `strands.py`)."""


def blocked(wait: Wait) -> Any:
    """What a task that blocks has waited for."""
    if block is None:
        raise RuntimeError("this task must not block")
    return block(wait)


class Trap:
    """Awaited by a task: hands the `Wait` to whoever drives the process."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Wait, Any, Any]:
        return blocked(self._wait) if block is not None else (yield self._wait)


class VirtualWaker:
    """`ports.Waker` of a process; `kind` tells a wait for mail from other waits."""

    def __init__(self, process: Process, kind: str = "wake") -> None:
        self._process = process
        self._kind = kind
        self._called = False

    def wake(self) -> None:
        if not self._process.settle(self._kind, self, True):
            self._called = True

    async def wait(self, until: float | None) -> bool:
        if self._called:
            self._called = False
            return True
        if until is not None and until <= self._process.now():
            return False
        return bool(await Trap(Wait(self._kind, self, until)))


class VirtualMailbox:
    """`ports.Mailbox`, with the manners of the shipped ones."""

    def __init__(self, process: Process, holder: str) -> None:
        self._process = process
        self._holder = holder
        self._pushes: deque[GrantNotification | FirstNotification] = deque()
        self._waker = VirtualWaker(process, "mail")
        self._address = ""

    @property
    def address(self) -> str:
        return self._process.address

    async def open(self, until: float) -> None:
        self._process.boxes[self._holder] = self
        self._address = await self._process.subscribed(until)

    def push(self, push: GrantNotification | FirstNotification) -> None:
        self._pushes.append(push)
        self._waker.wake()

    def wake(self) -> None:
        self._waker.wake()

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        if self._hears():
            if not self._pushes:
                await self._waker.wait(until)
            if self._pushes:
                return self._pushes.popleft()
            if self._hears():
                return None
        self._address = await self._process.subscribed(until)
        return None  # a push may have come while nobody listened

    def _hears(self) -> bool:
        return self._process.listening and self._address == self._process.address

    def close(self) -> None:
        self._process.boxes.pop(self._holder, None)
