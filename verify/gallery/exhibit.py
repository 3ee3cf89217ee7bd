"""An exhibit of the gallery: a broken lock and the model in which it breaks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verify.process import Process, Program
from verify.world import Client, Model

TTL = 3
TTL_MS = 3000

__all__ = ["TTL", "TTL_MS", "Exhibit", "Process", "exhibit"]


@dataclass(frozen=True)
class Exhibit:
    """A broken lock: its code and scripts, the model in which it breaks, the rule that it breaks, and the explanation.

    `row` is the id of the system in docs/systems.md, if it has one.
    """

    title: str
    breaks: str
    failure: str
    fix: str
    model: Model
    code: Sequence[Callable[..., Any]]
    scripts: Sequence[str]
    row: str


def exhibit(
    title: str,
    *,
    breaks: str,
    failure: str,
    fix: str,
    row: str = "",
    clients: dict[str, Program],
    code: Sequence[Callable[..., Any]],
    scripts: Sequence[str] = (),
    seconds: float = 7.0,
    servers: int = 1,
    fence_key: bytes = b"",
    listening: bool = True,
    after: dict[str, str] | None = None,
    mortal: str = "ABC",
    **faults: int,
) -> Exhibit:
    """Create an exhibit. `clients` maps names to programs; `after` maps a client to the one that must signal first."""
    predecessors = after or {}
    model = Model(
        name=title,
        clients=[
            Client(name, program, listening=listening, mortal=name in mortal, after=predecessors.get(name))
            for name, program in clients.items()
        ],
        faults=faults,
        seconds=seconds,
        servers=servers,
        rules=frozenset({breaks, "ER"}),
        fence_key=fence_key,
        tidy_crashes=True,
    )
    return Exhibit(title, breaks, failure, fix, model, code, scripts, row)
