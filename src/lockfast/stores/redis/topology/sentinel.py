"""Where the master is, as the sentinels see it.

An instance takes the place of the client library's own pool under its Sentinel connections, which ask it for an address
each time they dial. The library's own search is not used: it retries each sentinel for seconds, and a lock has none.

Rules kept here:

- Each sentinel gets `ASK_WITHIN` seconds and no retry; the one that answered last is asked first.
- A master that a sentinel believes to be down is not dialled: a failover is under way, and will be asked about again.
- When the master is another one than before, both connections to the old one are dropped at once. An inbox that stayed
  with the old master would get no push, and requests to it would be lost.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from lockfast.errors import StoreUnavailable
from lockfast.values import clean, shown

log = logging.getLogger("lockfast")

ASK_WITHIN = 0.5
SEARCH_WITHIN = 0.9
"""Seconds after which no further sentinel is asked for this dial; the next one begins where it ended."""

Address = tuple[str, int]


class Watcher(NamedTuple):
    """How to dial one sentinel."""

    connection_class: Callable[..., Any]
    settings: dict[str, Any]

    def dial(self) -> Any:
        limits = {"socket_timeout": ASK_WITHIN, "socket_connect_timeout": ASK_WITHIN}
        return self.connection_class(**{**self.settings, **limits})


class Sentinels:
    """Those who watch one service. `master` is where they said it is; `on_switch` is called when that changes."""

    is_master = True
    check_connection = False

    def __init__(
        self, service: str, watchers: Sequence[Watcher], *, others: int = 0, master_ip: str | None = None
    ) -> None:
        self.service_name = service
        self.master: Address | None = None
        self.on_switch: Callable[[], None] | None = None
        self._watchers = list(watchers)
        self._others = others
        self._master_ip = master_ip

    async def find(self) -> Address:
        """The master's address by the first sentinel that has one; `StoreUnavailable` when none has."""
        problem = "none was named"
        give_up_at = time.monotonic() + SEARCH_WITHIN
        for watcher in tuple(self._watchers):
            if time.monotonic() > give_up_at:
                break
            others = [one for one in self._watchers if one is not watcher]
            self._watchers = [*others, watcher]  # should the caller's time run out here, others come first next time
            try:
                told = await _ask(watcher, self.service_name)
                address = self._address(told)
            except Exception as error:
                problem = clean(str(error), 120) or type(error).__name__
                continue
            self._watchers = [watcher, *others]
            self._found(address)
            return address
        raise StoreUnavailable(
            f"No sentinel names a working master of the service {shown(self.service_name)}, so nothing was sent. "
            f"Is a failover under way, or is the name wrong? [{problem}]"
        )

    def _address(self, told: dict[str, str]) -> Address:
        flags = told["flags"].split(",")
        if "s_down" in flags or "o_down" in flags or "master" not in flags:
            raise LookupError("the master is down")
        if int(told.get("num-other-sentinels", 0)) < self._others:
            raise LookupError("the sentinel sees too few others")
        return self._master_ip or told["ip"], int(told["port"])

    def _found(self, address: Address) -> None:
        before, self.master = self.master, address
        if before is not None and before != address:
            log.warning("The master of the service %s is another server now.", shown(self.service_name))
            if self.on_switch is not None:
                self.on_switch()


class ThreadSentinels(Sentinels):
    """For connections that block."""

    def get_master_address(self) -> Address:
        return _run(self.find())


class TaskSentinels(Sentinels):
    """For connections of asyncio."""

    async def get_master_address(self) -> Address:
        return await self.find()


async def _ask(watcher: Watcher, service: str) -> dict[str, str]:
    """What a sentinel tells of a master. On threads nothing here suspends."""
    connection = watcher.dial()
    try:
        await _settled(connection.connect())
        await _settled(connection.send_command("SENTINEL", "MASTER", service))
        reply = await _settled(connection.read_response())
    finally:
        await _settled(connection.disconnect())
    parts = [part for pair in reply.items() for part in pair] if isinstance(reply, dict) else reply
    words = [part.decode("utf-8", "replace") if isinstance(part, bytes) else str(part) for part in parts]
    return dict(zip(words[::2], words[1::2], strict=True))


async def _settled(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _run(work: Coroutine[Any, Any, Address]) -> Address:
    """The result of a coroutine whose connections block instead of suspending."""
    try:
        work.send(None)
    except StopIteration as stop:
        address: Address = stop.value
        return address
    work.close()
    raise RuntimeError("A connection for threads suspended.")
