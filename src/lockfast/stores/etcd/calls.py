"""Requests to etcd over HTTP, in both colours; httpx carries them.

Rules kept here: a request that may have reached a server has an unknown outcome, one that found no server was not done,
and goes to the next server of the list; a token that has run out is replaced, once; no password reaches a message.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from lockfast.errors import ConfigurationError, Outcome, StoreError, StoreProtocolError, StoreRefused, StoreUnavailable
from lockfast.ports import Runtime
from lockfast.values import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAST_LIMIT = 0.02
"""Seconds that a request gets at the least, however little time its caller has."""
UNAUTHENTICATED, DENIED, MISSING, PRECONDITION = 16, 7, 5, 9
"""What etcd's error codes mean, as far as it matters here."""
SHAPE = "etcd://user:password@host1:2379,host2:2379 (etcds:// for TLS)"


class Answered(Exception):
    """etcd answered with an error; `code` is its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Calls(Protocol):
    """One etcd cluster, as a store calls it."""

    async def call(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        """The answer; `Answered` for an error that etcd gave, `StoreUnavailable` when none came in time."""

    def lines(self, path: str, body: dict[str, Any], until: float) -> AsyncIterator[dict[str, Any]]:
        """The parts of an answer that goes on; ends at `until`. `StoreUnavailable` when the connection ends first."""

    async def close(self) -> None: ...

    def reset(self) -> None: ...


class _Servers:
    """The servers of one URL, tried in turn, and the credentials for them."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            hosts = parts.netloc.rpartition("@")[2].split(",")
            tls = parts.scheme.lower() == "etcds"
            self.urls = [_base(host, tls) for host in hosts]
            self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        except ValueError:
            raise _unreadable() from None
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise _unreadable()
        self.shown = clean(f"{parts.scheme.lower()}://{','.join(hosts)}")
        self.token: str | None = None
        self._first = 0

    @property
    def credentials(self) -> dict[str, Any] | None:
        return {"name": self._user, "password": self._password} if self._user else None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": self.token}

    def in_turn(self) -> list[str]:
        return self.urls[self._first :] + self.urls[: self._first]

    def unreachable(self, url: str) -> None:
        self._first = (self.urls.index(url) + 1) % len(self.urls)


def _base(host: str, tls: bool) -> str:
    parts = urlsplit(f"//{host}")
    if not parts.hostname or (parts.port is not None and parts.port < 1):
        raise ValueError(host)
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{'https' if tls else 'http'}://{name}:{parts.port or 2379}"


def _unreadable() -> ConfigurationError:
    return ConfigurationError(f"This etcd URL can't be read. It should look like {SHAPE}.")


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ConfigurationError(
            "An etcd URL needs httpx, which is not installed. Run: pip install 'lockfast[etcd]'"
        ) from error
    return httpx


class _Base:
    """What both colours share: limits, errors, tokens."""

    def __init__(self, url: str, runtime: Runtime) -> None:
        self._httpx = _httpx()
        self._servers = _Servers(url)
        self.shown = self._servers.shown
        self._runtime = runtime
        self._client: Any = None

    def _limit(self, until: float) -> float:
        return max(LEAST_LIMIT, until - self._runtime.now())

    def _made(self, kind: Callable[..., Any]) -> Any:
        if self._client is None:
            self._client = kind(limits=self._httpx.Limits(max_connections=None), trust_env=False)
        return self._client

    @contextmanager
    def _meaning(self) -> Iterator[None]:
        httpx = self._httpx
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise StoreUnavailable(
                f"No connection to etcd, so nothing was changed. Is it running, and is the address right? "
                f"[{clean(str(error), 160)}]"
            ) from error
        except (httpx.TransportError, RuntimeError) as error:  # a client that is closed under us raises the latter
            raise StoreUnavailable(
                "The request to etcd got no answer; it may or may not have been carried out. "
                f"[{clean(str(error) or type(error).__name__, 160)}]",
                outcome=Outcome.UNKNOWN,
            ) from error

    def _decoded(self, response: Any) -> dict[str, Any]:
        try:
            answer = response.json()
            code = int(answer.get("code", 0))
        except (ValueError, AttributeError, TypeError):
            raise StoreProtocolError(
                f"The answer makes no sense for etcd (HTTP status {response.status_code}): is it etcd 3.4 or later?"
            ) from None
        if response.status_code >= 400 or code:
            raise Answered(code, clean(str(answer.get("message") or answer.get("error")), 160))
        return dict(answer)

    def _stale_token(self, error: Answered) -> bool:
        return self._servers.credentials is not None and (
            error.code == UNAUTHENTICATED or "user name is empty" in str(error)
        )

    def reset(self) -> None:
        self._client = None


def meaning_of(error: Answered, about: str) -> StoreError:
    """What an error of etcd means for a lock, where the store has no answer of its own to it."""
    if error.code in (DENIED, UNAUTHENTICATED) or "auth" in str(error) or "user name" in str(error):
        return StoreRefused(
            f"etcd refused an operation on {about}: the account needs to read and write keys under lockfast/. [{error}]"
        )
    return StoreUnavailable(
        f"etcd could not serve an operation on {about}; it may or may not have been carried out. [{error}]",
        outcome=Outcome.UNKNOWN,
    )


class ThreadCalls(_Base):
    """`Calls` that block."""

    async def call(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        if self._servers.credentials is not None and self._servers.token is None:
            self._sign_in(until)
        try:
            return self._post(path, body, until)
        except Answered as error:
            if not self._stale_token(error):
                raise
            self._sign_in(until)
            return self._post(path, body, until)

    def _post(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        client = self._made(self._httpx.Client)
        for attempt, base in enumerate(urls := self._servers.in_turn(), 1):
            try:
                with self._meaning():
                    return self._decoded(
                        client.post(base + path, json=body, headers=self._servers.headers, timeout=self._limit(until))
                    )
            except StoreUnavailable as error:
                self._servers.unreachable(base)
                if error.outcome is Outcome.UNKNOWN or attempt == len(urls):
                    raise
        raise StoreUnavailable("No etcd server was given.")

    def _sign_in(self, until: float) -> None:
        self._servers.token = None
        self._servers.token = self._post("/v3/auth/authenticate", self._servers.credentials or {}, until)["token"]

    async def lines(self, path: str, body: dict[str, Any], until: float) -> AsyncIterator[dict[str, Any]]:
        client, base, httpx = self._made(self._httpx.Client), self._servers.in_turn()[0], self._httpx
        limit = self._limit(until)
        try:
            with (
                self._meaning(),
                client.stream("POST", base + path, json=body, headers=self._servers.headers, timeout=limit) as response,
            ):
                for line in response.iter_lines():
                    yield json.loads(line)
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, httpx.ReadTimeout):
                self._servers.unreachable(base)
                raise

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()


class TaskCalls(_Base):
    """`Calls` that suspend."""

    async def call(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        if self._servers.credentials is not None and self._servers.token is None:
            await self._sign_in(until)
        try:
            return await self._post(path, body, until)
        except Answered as error:
            if not self._stale_token(error):
                raise
            await self._sign_in(until)
            return await self._post(path, body, until)

    async def _post(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        client = self._made(self._httpx.AsyncClient)
        for attempt, base in enumerate(urls := self._servers.in_turn(), 1):
            try:
                with self._meaning():
                    return self._decoded(
                        await client.post(
                            base + path, json=body, headers=self._servers.headers, timeout=self._limit(until)
                        )
                    )
            except StoreUnavailable as error:
                self._servers.unreachable(base)
                if error.outcome is Outcome.UNKNOWN or attempt == len(urls):
                    raise
        raise StoreUnavailable("No etcd server was given.")

    async def _sign_in(self, until: float) -> None:
        self._servers.token = None
        answer = await self._post("/v3/auth/authenticate", self._servers.credentials or {}, until)
        self._servers.token = answer["token"]

    async def lines(self, path: str, body: dict[str, Any], until: float) -> AsyncIterator[dict[str, Any]]:
        client, base, httpx = self._made(self._httpx.AsyncClient), self._servers.in_turn()[0], self._httpx
        limit = self._limit(until)
        try:
            with self._meaning():
                async with client.stream(
                    "POST", base + path, json=body, headers=self._servers.headers, timeout=limit
                ) as response:
                    async for line in response.aiter_lines():
                        yield json.loads(line)
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, httpx.ReadTimeout):
                self._servers.unreachable(base)
                raise

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
