"""A connection to ZooKeeper through kazoo, for threads and tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from lockfast.errors import ConfigurationError, Outcome, StoreRefused, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.values import clean

kazoo_log = logging.getLogger("lockfast.kazoo")
kazoo_log.setLevel(logging.CRITICAL)  # our errors report the same

SESSION_SECONDS = 10.0  # how long ZooKeeper keeps a silent session; only watches depend on it
LEAST_LIMIT = 0.02  # seconds that a request gets at least, even if its caller has less time left


class Session:
    """One kazoo client, in both flavours, started at the first request.

    kazoo sends requests from its own thread. It keeps a request while it is disconnected, and may send it after its
    caller has gone. So a request without a reply in time has an unknown outcome.
    """

    def __init__(self, url: str, runtime: Runtime, flavour: str) -> None:
        try:
            import kazoo.client
            import kazoo.exceptions
        except ImportError as error:
            raise ConfigurationError(
                "A ZooKeeper URL needs kazoo, which is not installed. Run: pip install 'lockfast[zookeeper]'"
            ) from error
        self._new_client = kazoo.client.KazooClient
        self._errors: Any = kazoo.exceptions
        self._runtime = runtime
        self._is_async = flavour == "asyncio"
        self._mutex = runtime.mutex()
        self._client: Any = None
        self._connected: Any = None
        self._closed = self._was_connected = False
        try:
            parts = urlsplit(url)
            hosts = parts.netloc.rpartition("@")[2].split(",")
            ports = [urlsplit(f"//{host}").port for host in hosts]  # raises ValueError for an invalid port
            if not all(hosts) or 0 in ports or parts.path not in ("", "/") or parts.query or parts.fragment:
                raise ValueError
        except ValueError:
            raise ConfigurationError(
                "This ZooKeeper URL is not valid. It should look like zookeeper://user:password@host1:2181,host2:2181."
            ) from None
        self._login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
        self._hosts = ",".join(hosts)
        self.shown = clean(f"zookeeper://{self._hosts}")

    def _started(self) -> Any:
        with self._mutex:
            if self._closed:
                raise closed_error()
            if self._client is None:
                auth = [("digest", self._login)] if self._login else None
                self._client = self._new_client(self._hosts, timeout=SESSION_SECONDS, auth_data=auth, logger=kazoo_log)
                self._connected = self._client.start_async()
            return self._client

    async def request(self, send: Callable[[Any], Any], until: float) -> Any:
        """Call `send(client)` and return the reply; None if a node is missing or another client changed it first."""
        return (await self.requests([send], until))[0]

    async def requests(self, sends: Sequence[Callable[[Any], Any]], until: float) -> list[Any]:
        """Send several requests together, which ZooKeeper executes in this order, and return their replies."""
        client = self._started()
        limit = max(LEAST_LIMIT, until - self._runtime.now())
        if not self._connected.is_set() and not await self._call(self._connected.wait, limit):
            if self._was_connected:  # an earlier request of the same operation may have been executed
                raise _unknown("the connection was lost")
            raise StoreUnavailable(
                "Cannot connect to ZooKeeper; nothing was changed. Check that it is running, and the address."
            )
        self._was_connected = True
        return [await self._reply(client, reply, until) for reply in [send(client) for send in sends]]

    async def _reply(self, client: Any, reply: Any, until: float) -> Any:
        errors = self._errors
        limit = max(LEAST_LIMIT, until - self._runtime.now())
        try:
            if self._is_async:
                await self._arrival(reply, limit)
            return reply.get(block=not self._is_async, timeout=limit)
        except (errors.NoNodeError, errors.NodeExistsError, errors.BadVersionError, errors.NotEmptyError):
            return None
        except (TimeoutError, client.handler.timeout_exception) as error:
            raise _unknown("it did not reply in time") from error
        except (errors.ConnectionLoss, errors.SessionExpiredError, errors.ConnectionClosedError) as error:
            raise _unknown("the connection was lost") from error
        except (errors.NoAuthError, errors.AuthFailedError) as error:
            raise StoreRefused(
                "ZooKeeper refused the request; nothing was changed. Give the account all rights on the nodes below "
                "/lockfast."
            ) from error

    async def _call(self, blocking: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of kazoo that blocks; on asyncio, in a worker thread."""
        return await asyncio.to_thread(blocking, *arguments) if self._is_async else blocking(*arguments)

    async def _arrival(self, reply: Any, limit: float) -> None:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        reply.rawlink(lambda _: loop.call_soon_threadsafe(arrived.set))
        async with asyncio.timeout(limit):
            await arrived.wait()

    async def close(self) -> None:
        with self._mutex:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            await self._call(client.stop)
            await self._call(client.close)

    def reset(self) -> None:
        self._mutex = self._runtime.mutex()
        self._client = None


def _unknown(reason: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"No reply from ZooKeeper: {reason}. The request may or may not have been executed.", outcome=Outcome.UNKNOWN
    )
