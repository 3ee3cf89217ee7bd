"""A pytest plugin: locks for tests, on a store in memory and a clock that makes nobody wait.

Installed with holdfast; `holdfast_sandbox`, `holdfast_locks`, `holdfast_async_locks` and `holdfast_connect` are then
fixtures like any other. See docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast.connection import AsyncLocks, Locks
    from holdfast.testing.sandbox import Sandbox


@pytest.fixture
def holdfast_sandbox() -> Iterator[Sandbox]:
    """A store, a clock and faults at your command, for one test."""
    from holdfast.testing.sandbox import Sandbox  # here, so that a run without locks loads nothing

    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def holdfast_locks(holdfast_sandbox: Sandbox) -> Locks:
    """What `holdfast.connect()` would return, on the sandbox."""
    return holdfast_sandbox.locks


@pytest.fixture
def holdfast_async_locks(holdfast_sandbox: Sandbox) -> AsyncLocks:
    """What `holdfast.aio.connect()` would return, on the sandbox; use it within `holdfast_sandbox.run(...)`."""
    return holdfast_sandbox.async_locks


@pytest.fixture
def holdfast_connect(holdfast_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """For code that connects by itself: `holdfast.connect()` and `holdfast.aio.connect()` lead to the sandbox."""
    import holdfast
    import holdfast.aio

    def connect(target: Any = None, **choices: Any) -> Locks:
        return holdfast_sandbox.locks

    def connect_asyncio(target: Any = None, **choices: Any) -> AsyncLocks:
        return holdfast_sandbox.async_locks

    monkeypatch.setattr(holdfast, "connect", connect)
    monkeypatch.setattr(holdfast.aio, "connect", connect_asyncio)
    return holdfast_sandbox
