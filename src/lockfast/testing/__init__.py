"""Test support for users: `Sandbox` and pytest fixtures for code that uses locks, `contract` for your own store.

No other part of the package imports it.

>>> from lockfast.testing import Sandbox
>>> sandbox = Sandbox()
>>> with sandbox.locks.lock("door", ttl=10) as lease:
...     sandbox.advance(3600)  # takes no real time
...     lease.state.value
'held'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockfast.testing.sandbox import Held, Sandbox, Stuck

__all__ = ["Held", "Sandbox", "Stuck"]


def __getattr__(name: str) -> Any:
    """Load the sandbox on first use: the store contract does not need it."""
    if name in __all__:
        from lockfast.testing import sandbox

        return getattr(sandbox, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
