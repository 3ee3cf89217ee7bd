"""pytest plugin: fixtures with locks on an in-memory store and a virtual clock.

pytest loads it wherever lockfast is installed: `lockfast_sandbox`, `lockfast_locks`, `lockfast_async_locks`,
`lockfast_connect`. See docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lockfast.client.locks import AsyncLocks, Locks
    from lockfast.testing.sandbox import Sandbox


@pytest.fixture
def lockfast_sandbox() -> Iterator[Sandbox]:
    """A `Sandbox` for one test."""
    from lockfast.testing.sandbox import Sandbox  # here, so that test runs without locks do not load it

    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def lockfast_locks(lockfast_sandbox: Sandbox) -> Locks:
    """The equivalent of `lockfast.connect()`, on the sandbox."""
    return lockfast_sandbox.locks


@pytest.fixture
def lockfast_async_locks(lockfast_sandbox: Sandbox) -> AsyncLocks:
    """The equivalent of `lockfast.aio.connect()`, on the sandbox; use it within `lockfast_sandbox.run(...)`."""
    return lockfast_sandbox.async_locks


@pytest.fixture
def lockfast_connect(lockfast_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Make `lockfast.connect()` and `lockfast.aio.connect()` return the sandbox's locks, whatever their arguments."""
    monkeypatch.setattr("lockfast.connect", lambda target=None, **options: lockfast_sandbox.locks)
    monkeypatch.setattr("lockfast.aio.connect", lambda target=None, **options: lockfast_sandbox.async_locks)
    return lockfast_sandbox
