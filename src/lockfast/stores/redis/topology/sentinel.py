"""Find the master of a service through its sentinels.

A `Sentinels` object replaces the pool of the client library's Sentinel-managed connections, which ask it for an
address whenever they connect. The library's own search retries each sentinel for seconds, which is too slow for a lock.

Rules:

- Each sentinel gets `REPLY_LIMIT` seconds and no retry. The sentinel that answered last is asked first.
- A master that its sentinel considers down is not used: a failover is in progress, and the next connect asks again.
- When the master changes, both connections to the old one are closed at once. The old master would notify nobody, and
  requests sent to it would be lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from lockfast.errors import StoreUnavailable, shown
from lockfast.stores.redis.urls import Address
from lockfast.stores.redis.user_client import settled
from lockfast.values import clean

log = logging.getLogger("lockfast")

REPLY_LIMIT = 0.5
SEARCH_LIMIT = 0.9  # seconds after which a search stops asking further sentinels; the next search continues with them


class Sentinel(NamedTuple):
    """How to connect to one sentinel."""

    connection_class: Callable[..., Any]
    settings: dict[str, Any]

    async def master(self, service: str) -> dict[str, str]:
        """The fields of the sentinel's reply about a master. Never suspends in the sync flavour."""
        limits = {"socket_timeout": REPLY_LIMIT, "socket_connect_timeout": REPLY_LIMIT}
        connection = self.connection_class(**{**self.settings, **limits})
        try:
            await settled(connection.connect())
            await settled(connection.send_command("SENTINEL", "MASTER", service))
            reply = await settled(connection.read_response())
        finally:
            await settled(connection.disconnect())
        parts = [part for pair in reply.items() for part in pair] if isinstance(reply, dict) else reply
        words = [part.decode("utf-8", "replace") if isinstance(part, bytes) else str(part) for part in parts]
        return dict(zip(words[::2], words[1::2], strict=True))


class Sentinels:
    """The sentinels of one service. `on_new_master` is called when the master has changed."""

    is_master = True
    check_connection = False

    def __init__(
        self,
        service: str,
        sentinels: Sequence[Sentinel],
        flavour: str,
        *,
        min_other_sentinels: int = 0,
        forced_ip: str | None = None,
    ) -> None:
        self.service_name = service
        self.on_new_master: Callable[[], None] | None = None
        self._master: Address | None = None
        self._sentinels = list(sentinels)
        self._flavour = flavour
        self._min_others = min_other_sentinels
        self._forced_ip = forced_ip

    def get_master_address(self) -> Address | Coroutine[Any, Any, Address]:
        """Called by the library's connections, which await the result in the async flavour."""
        return _run(self._find()) if self._flavour == "threads" else self._find()

    async def _find(self) -> Address:
        """The master's address, from the first sentinel that knows a healthy one."""
        problem = "no sentinel is configured"
        give_up_at = time.monotonic() + SEARCH_LIMIT
        for sentinel in tuple(self._sentinels):
            if time.monotonic() > give_up_at:
                break
            others = [one for one in self._sentinels if one is not sentinel]
            self._sentinels = [*others, sentinel]  # if the caller is cancelled here, the next search starts elsewhere
            try:
                address = self._address(await sentinel.master(self.service_name))
            except Exception as error:
                problem = clean(str(error), 120) or type(error).__name__
                continue
            self._sentinels = [sentinel, *others]
            before, self._master = self._master, address
            if before not in (None, address):
                log.warning("Service %s has a new master; reconnecting to it.", shown(self.service_name))
                if self.on_new_master is not None:
                    self.on_new_master()
            return address
        raise StoreUnavailable(
            f"No sentinel reports a healthy master of the service {shown(self.service_name)}, so nothing was sent. "
            f"Check the service name, and whether a failover is in progress. [{problem}]"
        )

    def _address(self, master: dict[str, str]) -> Address:
        flags = master["flags"].split(",")
        if "s_down" in flags or "o_down" in flags or "master" not in flags:
            raise LookupError("the master is down")
        if int(master.get("num-other-sentinels", 0)) < self._min_others:
            raise LookupError("the sentinel sees too few other sentinels")
        return self._forced_ip or master["ip"], int(master["port"])


def _run(work: Coroutine[Any, Any, Address]) -> Address:
    """Run a coroutine whose connections block instead of suspending."""
    try:
        work.send(None)
    except StopIteration as stop:
        address: Address = stop.value
        return address
    work.close()
    raise RuntimeError("A sync connection suspended.")
