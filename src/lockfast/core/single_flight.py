"""Work that is done once, to its end, however many ask for it and whoever of them is cancelled meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from lockfast.ports import Runtime, Waker


class Once:
    """Invariant: at most one of those who ask does the work; the others wait until it has ended. Work that was
    interrupted before its end is begun again by the next who asks."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._mutex = runtime.mutex()
        self._begun = False
        self._ended = False
        self._waiting: list[Waker] = []

    async def request(self, work: Callable[[], Coroutine[Any, Any, None]], patience: float) -> None:
        """Return when the work has ended, or when `patience` seconds passed first."""
        waker = None
        with self._mutex:
            if self._begun:
                if self._ended:
                    return
                waker = self._runtime.waker()
                self._waiting.append(waker)
            self._begun = True
        if waker is None:
            await self._runtime.finish(lambda: self._to_its_end(work), self._name, patience)
        else:
            await waker.wait(self._runtime.now() + patience)

    async def _to_its_end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
            self._ended = True
        except BaseException:
            self._begun = False
            raise
        finally:
            with self._mutex:
                waiting, self._waiting = self._waiting, []
            for waker in waiting:
                waker.wake()
