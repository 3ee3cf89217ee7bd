"""A pytest plugin: locks for tests, on a store in memory and a clock that makes nobody wait.

Installed with holdfast; `holdfast_stage`, `holdfast_locks`, `holdfast_async_locks` and `holdfast_connect` are then
fixtures like any other. See docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast.connection import AsyncLocks, Locks
    from holdfast.testing.stage import Stage


@pytest.fixture
def holdfast_stage() -> Iterator[Stage]:
    """A store, a clock and faults at your command, for one test."""
    from holdfast.testing.stage import Stage  # here, so that a run without locks loads nothing

    with Stage() as stage:
        yield stage


@pytest.fixture
def holdfast_locks(holdfast_stage: Stage) -> Locks:
    """What `holdfast.connect()` would return, on the stage."""
    return holdfast_stage.locks


@pytest.fixture
def holdfast_async_locks(holdfast_stage: Stage) -> AsyncLocks:
    """What `holdfast.aio.connect()` would return, on the stage; use it within `holdfast_stage.run(...)`."""
    return holdfast_stage.async_locks


@pytest.fixture
def holdfast_connect(holdfast_stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """For code that connects by itself: `holdfast.connect()` and `holdfast.aio.connect()` lead to the stage."""
    import holdfast
    import holdfast.aio

    def connect(target: Any = None, **choices: Any) -> Locks:
        return holdfast_stage.locks

    def connect_asyncio(target: Any = None, **choices: Any) -> AsyncLocks:
        return holdfast_stage.async_locks

    monkeypatch.setattr(holdfast, "connect", connect)
    monkeypatch.setattr(holdfast.aio, "connect", connect_asyncio)
    return holdfast_stage
