"""Assign each frame from the server to the request that it answers; the others are pushes.

Replies arrive in the order of the requests. SUBSCRIBE and similar commands are exceptions: the server confirms them
once per channel, in RESP3 as pushes, with messages in between. MONITOR and CLIENT REPLY are not supported.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.faults import Rule
from tests.support.resp import Frame

CONFIRMATIONS = frozenset(
    (b"subscribe", b"psubscribe", b"ssubscribe", b"unsubscribe", b"punsubscribe", b"sunsubscribe")
)
MESSAGES = frozenset((b"message", b"pmessage", b"smessage"))


@dataclass(slots=True)
class Pending:
    """A request without a complete reply, and the rule for that reply."""

    args: Sequence[bytes]
    rule: Rule | None
    # Confirmations still expected; None before the first one, when earlier subscriptions are not known yet.
    due: int | None = None

    @property
    def command(self) -> bytes:
        return self.args[0].lower() if self.args else b""


class Conversation:
    """The open requests of one connection."""

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()
        # (b"subscribe" | b"psubscribe" | b"ssubscribe", channel), as confirmed by the server.
        self._subscriptions: set[tuple[bytes, bytes]] = set()
        self._resp3 = False

    def request(self, args: Sequence[bytes], rule: Rule | None) -> None:
        self._pending.append(Pending(args, rule))

    def answer(self, frame: Frame) -> Pending | None:
        """Return the request that this frame answers, or None for a push."""
        self._resp3 = self._resp3 or frame.is_push
        kind, channel = _kind_and_channel(frame)
        head = self._pending[0] if self._pending else None
        if head is not None and kind == head.command and kind in CONFIRMATIONS:
            return self._confirm(head, kind, channel)
        if frame.is_push or self._is_message(kind) or head is None:
            return None
        return self._pending.popleft()

    def _is_message(self, kind: bytes) -> bool:
        # In RESP2 a subscribed connection cannot run a command whose reply looks like this.
        return kind in MESSAGES and bool(self._subscriptions) and not self._resp3

    def _confirm(self, head: Pending, kind: bytes, channel: bytes) -> Pending:
        family = kind.replace(b"unsub", b"sub")
        if head.due is None:
            # UNSUBSCRIBE without channels is confirmed for each subscription, or once if there is none.
            ours = sum(1 for subscribed, _ in self._subscriptions if subscribed == family)
            head.due = len(head.args) - 1 or max(ours, 1)
        if kind == family:
            self._subscriptions.add((family, channel))
        else:
            self._subscriptions.discard((family, channel))
        head.due -= 1
        if head.due == 0:
            self._pending.popleft()
        return head


def push_args(frame: Frame) -> list[bytes]:
    """Return the byte strings of a push, to match rules against."""
    parts = frame.value if isinstance(frame.value, list) else [frame.value]
    return [part for part in parts if isinstance(part, bytes)]


def _kind_and_channel(frame: Frame) -> tuple[bytes, bytes]:
    args = push_args(frame) if isinstance(frame.value, list) else []
    kind, channel, *_ = [*args, b"", b""]
    return kind, channel
