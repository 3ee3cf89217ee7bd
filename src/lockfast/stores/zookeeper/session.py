"""Requests to ZooKeeper in both colours: kazoo sends them from a thread of its own, and we wait for its answer.

Rules kept here: kazoo keeps a request while it has no connection, and may send it when its caller has gone; so one that
was not answered in time has an unknown outcome. Answers that are errors of ZooKeeper come back as its exceptions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from lockfast.errors import ConfigurationError, Outcome, StoreError, StoreRefused, StoreUnavailable
from lockfast.ports import Runtime
from lockfast.values import clean

SHAPE = "zookeeper://user:password@host1:2181,host2:2181"
SESSION_SECONDS = 10.0
"""How long ZooKeeper keeps a silent session. Nothing but watches hangs on it."""
LEAST_LIMIT = 0.02


def _kazoo() -> Any:
    try:
        import kazoo.client
        import kazoo.exceptions
    except ImportError as error:
        raise ConfigurationError(
            "A ZooKeeper URL needs kazoo, which is not installed. Run: pip install 'lockfast[zookeeper]'"
        ) from error
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)  # what it would say, our errors say
    return kazoo


class Session:
    """One kazoo client, started when first used. `ask` is the only way in."""

    def __init__(self, url: str, runtime: Runtime, flavour: str) -> None:
        self._kazoo = _kazoo()
        self.errors = self._kazoo.exceptions
        self._runtime = runtime
        self._awaited = flavour == "asyncio"
        self._client: Any = None
        self._connected: Any = None
        try:
            parts = urlsplit(url)
            hosts = parts.netloc.rpartition("@")[2].split(",")
            ports = [urlsplit(f"//{host}").port for host in hosts]  # raises for what is no port
            self._login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
        except ValueError:
            raise _unreadable() from None
        if not all(hosts) or 0 in ports or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise _unreadable()
        self._hosts = ",".join(hosts)
        self.shown = clean(f"zookeeper://{self._hosts}")

    def _started(self) -> Any:
        if self._client is None:
            auth = [("digest", self._login)] if self._login else None
            self._client = self._kazoo.client.KazooClient(self._hosts, timeout=SESSION_SECONDS, auth_data=auth)
            self._connected = self._client.start_async()
        return self._client

    async def request(self, send: Callable[[Any], Any], until: float) -> Any:
        """The answer to what `send(client)` began, or the exception of ZooKeeper that it is."""
        client = self._started()
        limit = max(LEAST_LIMIT, until - self._runtime.now())
        if not self._connected.is_set() and not await self._await_connection(limit):
            raise StoreUnavailable(
                "No connection to ZooKeeper, so nothing was changed. Is it running, and is the address right?"
            )
        try:
            if self._awaited:
                return await self._awaited_answer(send(client), limit)
            return send(client).get(block=True, timeout=limit)
        except (TimeoutError, client.handler.timeout_exception) as error:
            raise _unanswered("it did not answer in time") from error
        except (
            self.errors.ConnectionLoss,
            self.errors.SessionExpiredError,
            self.errors.ConnectionClosedError,
        ) as error:
            raise _unanswered("the connection was lost") from error
        except (self.errors.NoAuthError, self.errors.AuthFailedError) as error:
            raise _refused() from error

    async def _await_connection(self, limit: float) -> bool:
        if self._awaited:
            return bool(await asyncio.to_thread(self._connected.wait, limit))
        return bool(self._connected.wait(limit))

    async def _awaited_answer(self, answer: Any, limit: float) -> Any:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        answer.rawlink(lambda _: loop.call_soon_threadsafe(arrived.set))
        async with asyncio.timeout(limit):
            await arrived.wait()
        return answer.get(block=False)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if self._awaited:
            await asyncio.to_thread(_end, client)
        else:
            _end(client)

    def reset(self) -> None:
        self._client = None


def _end(client: Any) -> None:
    client.stop()
    client.close()


def _unreadable() -> ConfigurationError:
    return ConfigurationError(f"This ZooKeeper URL can't be read. It should look like {SHAPE}.")


def _unanswered(why: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"ZooKeeper gave no answer: {why}. The request may or may not have been carried out.", outcome=Outcome.UNKNOWN
    )


def _refused() -> StoreError:
    return StoreRefused("ZooKeeper refused the request: the account needs all rights on the nodes below /lockfast.")
