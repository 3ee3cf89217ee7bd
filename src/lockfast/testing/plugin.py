"""A pytest plugin: locks for tests, on a store in memory and a clock that makes nobody wait.

Installed with lockfast; `lockfast_sandbox`, `lockfast_locks`, `lockfast_async_locks` and `lockfast_connect` are then
fixtures like any other. See docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lockfast.client.locks import AsyncLocks, Locks
    from lockfast.testing.sandbox import Sandbox


@pytest.fixture
def lockfast_sandbox() -> Iterator[Sandbox]:
    """A store, a clock and faults at your command, for one test."""
    from lockfast.testing.sandbox import Sandbox  # here, so that a run without locks loads nothing

    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def lockfast_locks(lockfast_sandbox: Sandbox) -> Locks:
    """What `lockfast.connect()` would return, on the sandbox."""
    return lockfast_sandbox.locks


@pytest.fixture
def lockfast_async_locks(lockfast_sandbox: Sandbox) -> AsyncLocks:
    """What `lockfast.aio.connect()` would return, on the sandbox; use it within `lockfast_sandbox.run(...)`."""
    return lockfast_sandbox.async_locks


@pytest.fixture
def lockfast_connect(lockfast_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """For code that connects by itself: `lockfast.connect()` and `lockfast.aio.connect()` lead to the sandbox."""
    import lockfast
    import lockfast.aio

    def connect(target: Any = None, **choices: Any) -> Locks:
        return lockfast_sandbox.locks

    def connect_asyncio(target: Any = None, **choices: Any) -> AsyncLocks:
        return lockfast_sandbox.async_locks

    monkeypatch.setattr(lockfast, "connect", connect)
    monkeypatch.setattr(lockfast.aio, "connect", connect_asyncio)
    return lockfast_sandbox
