"""Lose a lease at an exact moment."""

from typing import Any

from lockfast.errors import StoreUnavailable


def lose(lease: Any, why: str = "the test ended it") -> None:
    """Lose the lease as if the store had reported it. On asyncio, call it in the event loop."""
    lease._lose(why)


class Outage:
    """A store that cannot renew while `on`; all other requests work."""

    def __init__(self, locks: Any) -> None:
        self._store = locks.session.store
        self._renew = self._store.renew
        self.on = False
        self._store.renew = self._fail_or_renew

    async def _fail_or_renew(self, *args: Any) -> list[bool]:
        if self.on:
            raise StoreUnavailable("an outage")
        answers: list[bool] = await self._renew(*args)
        return answers
