"""How a test loses a lease at exactly the moment it wants."""

from typing import Any

from lockfast.errors import StoreUnavailable


def lose(lease: Any, why: str = "the test took it away") -> None:
    """What the keeper does when the store says that the grant is not ours. On asyncio, call it in the event loop."""
    lease._client.keepalive.unwatch(lease._lease_state)
    lease._lease_state.refused(why)


class Outage:
    """A store that cannot renew while this is on; everything else goes on."""

    def __init__(self, locks: Any) -> None:
        self._store = locks.store
        self._renew = self._store.renew
        self.on = False
        self._store.renew = self._fail_or_renew

    async def _fail_or_renew(self, *args: Any) -> list[bool]:
        if self.on:
            raise StoreUnavailable("an outage")
        answers: list[bool] = await self._renew(*args)
        return answers
