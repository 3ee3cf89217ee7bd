"""The `with` blocks that are under way on one object, and which of them ends."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple


class Block(NamedTuple):
    """A `with` block that is under way: who began it, in which frame (its id alone, so that nothing lives longer for
    it), and what it holds."""

    caller: Hashable
    frame: int
    lease: Any


def leave_block(blocks: list[Block], caller: Hashable, frame: int) -> Block | None:
    """The innermost block that `caller` is in, taken out. A generator may be ended by another than began it: then it
    is the block that this very frame began.

    >>> blocks = [Block("me", 1, "outer"), Block("you", 2, "yours"), Block("me", 1, "inner")]
    >>> leave_block(blocks, "me", 1).lease, leave_block(blocks, "them", 2).lease, leave_block(blocks, "me", 1).lease
    ('inner', 'yours', 'outer')
    """
    seen = tuple(blocks)
    fitting = [block for block in seen if block.caller == caller]
    fitting = fitting or [block for block in seen if block.frame == frame] or list(seen)
    if not fitting:
        return None
    blocks.remove(fitting[-1])
    return fitting[-1]
