"""What an exhibit of the gallery consists of."""

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
    """A broken lock: its code, the world in which it breaks, the rule it breaks, and how the story is told.

    `row` is the number under which the break is known in the list of lock systems that the project answers to.
    """

    title: str
    breaks: str
    wrong: str
    cure: str
    model: Model
    code: Sequence[Callable[..., Any]]
    row: str = ""


def exhibit(
    title: str,
    *,
    breaks: str,
    wrong: str,
    cure: str,
    row: str = "",
    clients: dict[str, Program],
    code: Sequence[Callable[..., Any]],
    seconds: float = 7.0,
    servers: int = 1,
    fence_key: bytes = b"",
    listening: bool = True,
    after: dict[str, str] | None = None,
    mortal: str = "ABC",
    **faults: int,
) -> Exhibit:
    """An exhibit; `clients` maps a name to its program, `after` says who waits for whose signal."""
    order = after or {}
    model = Model(
        name=title,
        clients=[
            Client(name, program, listening=listening, mortal=name in mortal, after=order.get(name))
            for name, program in clients.items()
        ],
        faults=faults,
        seconds=seconds,
        servers=servers,
        rules=frozenset({breaks, "ER"}),
        fence_key=fence_key,
        tidy_crashes=True,
    )
    return Exhibit(title, breaks, wrong, cure, model, code, row)
