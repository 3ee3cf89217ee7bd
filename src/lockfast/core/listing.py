"""List locks, page by page, as an operator wants to see them.

Rules: no name appears twice, though a store may report it twice. A pattern without `*?[` is inspected instead of
searched, so it also finds a lock that another program took. Locks without holder and waiters are left out unless
requested.
"""

from __future__ import annotations

from lockfast.core.retry import retry
from lockfast.ports import Ports
from lockfast.values import LockInfo, Page, is_plain, lock_name, name_pattern


class Listing:
    """One listing; `done` after the last page."""

    def __init__(self, ports: Ports, pattern: object, *, free: bool, patience: float) -> None:
        self._ports = ports
        self._pattern = name_pattern(pattern)
        self._free = free
        self._patience = patience
        self._cursor = ""
        self._seen: set[str] = set()
        self.done = False
        if is_plain(self._pattern):
            lock_name(self._pattern)

    async def next_page(self) -> list[LockInfo]:
        """Return more locks; the list can be empty before the end."""
        page = await retry(self._ports.runtime, self._request, self._patience)
        self._cursor = page.cursor
        self.done = not page.cursor
        fresh = [info for info in page.infos if info.name not in self._seen and self._matches(info)]
        if not self.done:
            self._seen.update(info.name for info in fresh)
        return fresh

    async def _request(self, until: float) -> Page:
        if is_plain(self._pattern):
            info = await self._ports.store.inspect(self._pattern, until)
            return Page((info._replace(waiters=()),), "")
        return await self._ports.store.listing(self._pattern, self._cursor, until)

    def _matches(self, info: LockInfo) -> bool:
        return info.locked or info.waiting > 0 or (self._free and info.fence is not None)
