"""List locks, part by part, as an operator wants to see them.

Rules kept here: no name twice, though a store may give it twice; a name without `*?[` is looked up and not searched
for, so that it is found also when something else than lockfast took it; what nobody holds or waits for is left out
unless asked for.
"""

from __future__ import annotations

from lockfast.core.retry import retry
from lockfast.ports import Runtime, Store
from lockfast.values import LockInfo, Page, is_plain, lock_name, name_pattern


class Listing:
    """One listing; `done` when there is no more."""

    def __init__(self, store: Store, runtime: Runtime, pattern: object, *, free: bool, patience: float) -> None:
        self._store = store
        self._runtime = runtime
        self._pattern = name_pattern(pattern)
        self._free = free
        self._patience = patience
        self._cursor = ""
        self._seen: set[str] = set()
        self.done = False
        if is_plain(self._pattern):
            lock_name(self._pattern)

    async def next_part(self) -> list[LockInfo]:
        """Some more locks; perhaps none, though it is not done yet."""
        page = await retry(self._runtime, self._ask, self._patience)
        self._cursor = page.cursor
        self.done = not page.cursor
        fresh = [info for info in page.infos if info.name not in self._seen and self._wanted(info)]
        if not self.done:
            self._seen.update(info.name for info in fresh)
        return fresh

    async def _ask(self, until: float) -> Page:
        if is_plain(self._pattern):
            info = await self._store.inspect(self._pattern, until)
            return Page((info._replace(waiters=()),), "")
        return await self._store.listing(self._pattern, self._cursor, until)

    def _wanted(self, info: LockInfo) -> bool:
        return info.locked or info.waiting > 0 or (self._free and info.fence is not None)
