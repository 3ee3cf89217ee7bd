"""HTTP requests to etcd, in both flavours, through httpx.

Rules:

- A request that may have reached a server has an unknown outcome. A request that found no server was not executed, and
  is sent to the next server of the list.
- An expired token is replaced once per request.
- No password appears in a message.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from lockfast import errors
from lockfast.errors import ConfigurationError, Outcome, StoreError, StoreRefused, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.values import clean

LEAST_LIMIT = 0.02  # seconds that a request gets at least, even if its caller has less time left
UNAUTHENTICATED, DENIED, NOT_FOUND, PRECONDITION = 16, 7, 5, 9  # error codes of etcd


class LeaseExpired(StoreUnavailable):
    """The etcd lease of a write has expired."""


class LeaseExists(StoreUnavailable):
    """The id of a new etcd lease is taken."""


class _ErrorReply(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def _store_error(error: _ErrorReply, about: str) -> StoreError:
    if error.code in (DENIED, UNAUTHENTICATED) or "auth" in str(error) or "user name" in str(error):
        return StoreRefused(
            f"etcd refused an operation on {about}; nothing was changed. Give the account the right to read and write "
            f"keys under lockfast/. [{error}]"
        )
    if error.code == NOT_FOUND:
        return LeaseExpired("The etcd lease expired before the lock was written; nothing was changed. Try again.")
    if error.code == PRECONDITION:
        return LeaseExists(f"etcd could not create {about}; nothing was changed. Try again. [{error}]")
    return StoreUnavailable(
        f"etcd could not serve an operation on {about}; it may or may not have been executed. [{error}]",
        outcome=Outcome.UNKNOWN,
    )


def _base_url(host: str, tls: bool) -> str:
    parts = urlsplit(f"//{host}")
    if not parts.hostname or (parts.port is not None and parts.port < 1):
        raise ValueError(host)
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{'https' if tls else 'http'}://{name}:{parts.port or 2379}"


class EtcdClient:
    """One etcd cluster: the servers of one URL, tried in order from `_first` on.

    Invariant: `_sockets` has the socket of every open stream, and changes only under `_mutex`.
    """

    def __init__(self, url: str, runtime: Runtime, flavour: str) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigurationError(
                "An etcd URL needs httpx, which is not installed. Run: pip install 'lockfast[etcd]'"
            ) from error
        self._httpx: Any = httpx
        self._is_async = flavour == "asyncio"
        try:
            parts = urlsplit(url)
            hosts = parts.netloc.rpartition("@")[2].split(",")
            self._urls = [_base_url(host, parts.scheme.lower() == "etcds") for host in hosts]
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            if parts.path not in ("", "/") or parts.query or parts.fragment:
                raise ValueError
        except ValueError:
            raise ConfigurationError(
                "This etcd URL is not valid. It should look like etcd://user:password@host1:2379,host2:2379 "
                "(etcds:// for TLS)."
            ) from None
        self.shown = clean(f"{parts.scheme.lower()}://{','.join(hosts)}")
        self._first = 0
        self._credentials = {"name": user, "password": password} if user else None
        self._headers: dict[str, str] = {}
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._http: Any = None
        self._sockets: list[Any] = []
        self._cancelled = self._closed = False

    async def call(self, path: str, body: dict[str, Any], until: float, about: str = "a lease") -> dict[str, Any]:
        """Return the reply, or raise a `StoreError`; `about` names the object of the request in its message."""
        try:
            return await self._post_with_token(path, body, until)
        except _ErrorReply as error:
            raise _store_error(error, about) from error

    async def stream(self, path: str, body: dict[str, Any], until: float) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the parts of a streamed reply until `until`; `StoreUnavailable` if the connection ends before."""
        base = self._urls[self._first]
        lines = self._stream(base + path, body, self._limit(until))
        try:
            with self._translated(base), suppress(self._httpx.ReadTimeout):
                async for line in lines:
                    yield json.loads(line)
        except StoreUnavailable:
            if not self._cancelled:
                raise
        finally:
            await lines.aclose()
        if self._cancelled:
            raise closed_error()

    def cancel_streams(self) -> None:
        """End all streams, open and future, with the error of a closed session. Any thread may call it."""
        with self._mutex:
            self._cancelled = True
            for socket in self._sockets:
                _shut_down(socket)

    @contextmanager
    def _registered(self, response: Any) -> Iterator[None]:
        """Let `cancel_streams` end this stream: only a shutdown wakes a thread that is blocked in a read."""
        socket = response.extensions["network_stream"].get_extra_info("socket")
        with self._mutex:
            self._sockets.append(socket)
            if self._cancelled:
                _shut_down(socket)
        try:
            yield
        finally:
            with self._mutex:
                self._sockets.remove(socket)

    async def _post_with_token(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        if self._credentials is None:
            return await self._post(path, body, until)
        if self._headers:
            try:
                return await self._post(path, body, until)
            except _ErrorReply as error:
                if error.code != UNAUTHENTICATED and "user name is empty" not in str(error):
                    raise
        self._headers = {}
        reply = await self._post("/v3/auth/authenticate", self._credentials, until)
        self._headers = {"Authorization": reply["token"]}
        return await self._post(path, body, until)

    async def _post(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        *others, last = self._urls[self._first :] + self._urls[: self._first]
        for base in others:
            try:
                return await self._post_to(base, path, body, until)
            except StoreUnavailable as error:
                if error.outcome is Outcome.UNKNOWN:
                    raise
        return await self._post_to(last, path, body, until)

    async def _post_to(self, base: str, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        with self._translated(base):
            http, limit = self._connected(), self._limit(until)
            reply = http.post(base + path, json=body, headers=self._headers, timeout=limit)
            return _decoded(await reply if self._is_async else reply)

    def _limit(self, until: float) -> float:
        return max(LEAST_LIMIT, until - self._runtime.now())

    @contextmanager
    def _translated(self, base: str) -> Iterator[None]:
        """Translate errors of httpx. After one, requests start with the server after `base`."""
        httpx = self._httpx
        try:
            yield
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed during the request
            self._first = (self._urls.index(base) + 1) % len(self._urls)
            text = clean(str(error) or type(error).__name__, 160)
            if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)):
                raise StoreUnavailable(
                    f"Cannot connect to etcd; nothing was changed. Check that it is running, and the address. [{text}]"
                ) from error
            raise StoreUnavailable(
                f"etcd did not reply; the request may or may not have been executed. [{text}]", outcome=Outcome.UNKNOWN
            ) from error

    def _connected(self) -> Any:
        with self._mutex:
            if self._closed:
                raise closed_error()
            if self._http is None:
                kind = self._httpx.AsyncClient if self._is_async else self._httpx.Client
                self._http = kind(limits=self._httpx.Limits(max_connections=None), trust_env=False)
            return self._http

    async def _stream(self, url: str, body: dict[str, Any], limit: float) -> AsyncGenerator[str, None]:
        reply = self._connected().stream("POST", url, json=body, headers=self._headers, timeout=limit)
        if self._is_async:
            async with reply as response:
                with self._registered(response):
                    async for line in response.aiter_lines():
                        yield line
        else:
            with reply as response, self._registered(response):
                for line in response.iter_lines():
                    yield line

    async def close(self) -> None:
        with self._mutex:
            self._closed = True
            http, self._http = self._http, None
        if http is not None:
            _ = await http.aclose() if self._is_async else http.close()

    def reset(self) -> None:
        self._mutex = self._runtime.mutex()
        self._http = None
        self._sockets = []


def _shut_down(stream: Any) -> None:
    # OSError: the server has closed it. A twin, because a socket of uvloop has no shutdown().
    with suppress(OSError), socket.socket(fileno=os.dup(stream.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def _decoded(response: Any) -> dict[str, Any]:
    try:
        reply = response.json()
        code = int(reply.get("code", 0))
    except (ValueError, AttributeError, TypeError):
        raise errors.StoreProtocolError(
            f"The reply is not etcd's (HTTP status {response.status_code}); the request may or may not have been "
            "executed. Check that the server is etcd 3.4 or later."
        ) from None
    if response.status_code >= 400 or code:
        raise _ErrorReply(code, clean(str(reply.get("message") or reply.get("error")), 160))
    return dict(reply)
