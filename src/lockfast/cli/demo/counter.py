"""The file that all workers write: a number, and the fence of who wrote it.

A write replaces the file as a whole, so that a process killed in the middle of one has either written or not. What
is not atomic is the turn (read, then write): that is what a lock is for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Tally(NamedTuple):
    """What the file says; the fence is 0 as long as nobody wrote with a lock."""

    total: int = 0
    fence: int = 0


def read(path: Path) -> Tally:
    total, fence = path.read_text("ascii").split()
    return Tally(int(total), int(fence))


def write(path: Path, tally: Tally) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(f"{tally.total} {tally.fence}\n", "ascii")
    draft.replace(path)
