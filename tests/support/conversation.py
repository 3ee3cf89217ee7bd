"""Which frame from the server answers which request; the others are pushes that nobody asked for.

Replies come in the order of the requests. SUBSCRIBE and its kin break the rule: they are answered once per
channel, as pushes in RESP3, and messages come between. MONITOR and CLIENT REPLY break it further and are
not supported.
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
class Asked:
    """A request that the server has, with the rule for its reply."""

    args: Sequence[bytes]
    rule: Rule | None
    # Confirmations still to come; None until the first one, when the subscriptions before it are known.
    due: int | None = None

    @property
    def command(self) -> bytes:
        return self.args[0].lower() if self.args else b""


class Conversation:
    """The open requests of one connection."""

    def __init__(self) -> None:
        self._asked: deque[Asked] = deque()
        # (b"subscribe" | b"psubscribe" | b"ssubscribe", channel), as confirmed by the server.
        self._subscriptions: set[tuple[bytes, bytes]] = set()
        self._resp3 = False

    def request(self, args: Sequence[bytes], rule: Rule | None) -> None:
        self._asked.append(Asked(args, rule))

    def answer(self, frame: Frame) -> Asked | None:
        """Return the request that this frame answers, or None for a push."""
        self._resp3 = self._resp3 or frame.is_push
        kind, channel = _kind_and_channel(frame)
        head = self._asked[0] if self._asked else None
        if head is not None and kind == head.command and kind in CONFIRMATIONS:
            return self._confirm(head, kind, channel)
        if frame.is_push or self._is_message(kind) or head is None:
            return None
        return self._asked.popleft()

    def _is_message(self, kind: bytes) -> bool:
        # In RESP2 a subscribed connection cannot run a command whose reply looks like this.
        return kind in MESSAGES and bool(self._subscriptions) and not self._resp3

    def _confirm(self, head: Asked, kind: bytes, channel: bytes) -> Asked:
        family = kind.replace(b"unsub", b"sub")
        if head.due is None:
            # UNSUBSCRIBE without channels is answered for each one there was, or once for none.
            ours = sum(1 for subscribed, _ in self._subscriptions if subscribed == family)
            head.due = len(head.args) - 1 or max(ours, 1)
        if kind == family:
            self._subscriptions.add((family, channel))
        else:
            self._subscriptions.discard((family, channel))
        head.due -= 1
        if head.due == 0:
            self._asked.popleft()
        return head


def push_args(frame: Frame) -> list[bytes]:
    """Return a push's byte strings, for a match to look at."""
    parts = frame.value if isinstance(frame.value, list) else [frame.value]
    return [part for part in parts if isinstance(part, bytes)]


def _kind_and_channel(frame: Frame) -> tuple[bytes, bytes]:
    args = push_args(frame) if isinstance(frame.value, list) else []
    kind, channel, *_ = [*args, b"", b""]
    return kind, channel
