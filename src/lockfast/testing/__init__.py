"""For those who test: `Sandbox` and the pytest fixtures of `plugin` are for code that uses locks; `contract` checks a
store of your own; the other modules run the shipped code in a small world (docs/how-it-is-shown.md).

Nothing outside this package imports it.

>>> from lockfast.testing import Sandbox
>>> sandbox = Sandbox()
>>> with sandbox.locks.lock("door", ttl=10) as lease:
...     sandbox.advance(3600)  # takes no time
...     lease.state.value
'held'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockfast.testing.sandbox import Held, Sandbox
    from lockfast.testing.virtual_threads import Stuck

__all__ = ["Held", "Sandbox", "Stuck"]


def __getattr__(name: str) -> Any:
    """Loaded when first used: the contract suite of a store needs none of it."""
    from importlib import import_module

    homes = {"Sandbox": "sandbox", "Held": "sandbox", "Stuck": "virtual_threads"}
    if name in homes:
        return getattr(import_module(f"{__name__}.{homes[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
