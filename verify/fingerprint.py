"""What a process is, as one comparable value: two processes of the same likeness will behave the same from now on.

A process is the tree of objects and suspended coroutines that hangs from it. Its likeness is that tree written down:
plain values as they are, objects by class and attributes, a coroutine by its code, the place where it stands and its
variables. What only tells of the past (the notes for a trace, the requests sent) is left out. Variables that will not
be used again are not, so it may tell apart what is in truth alike, but never takes for alike what is not.
"""

from __future__ import annotations

import enum
import functools
import logging
import marshal
import types
import weakref
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from verify.process import Process

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_ROWS = frozenset({list, tuple, deque})
_NAMED = (type, types.ModuleType, types.BuiltinFunctionType, logging.Logger, weakref.ref)
_PAST = frozenset({"sent", "notes", "chance", "_current", "_now"})
_MARK = "\0"
"""Begins what is not a value but says what kind of thing follows."""


def fingerprint(process: Process) -> bytes:
    """The value, as a digest. Of a process that is over, only what others may still be held against counts."""
    writer = _Writer()
    if process.over:
        refused = process.refused - process.releasing
        writer.write((process.holders, refused, process.signalled, process.lost(), process.problems))
    else:
        writer.write(process)
    return blake2b(marshal.dumps(writer.written, 2), digest_size=16).digest()


class _Writer:
    """Writes one thing after the other: what kind it is, how many parts it has, and those."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def write(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.written.append(value)
        elif kind in _ROWS:
            self._begin(kind.__name__, len(value))
            for one in value:
                self.write(one)
        elif kind is dict:
            self._pairs("dict", value.items())
        elif kind is set or kind is frozenset:
            self._begin("set", len(value))
            self.written.extend(sorted(value, key=repr))
        elif isinstance(value, enum.Enum):
            self._begin("enum", value.name)
        elif isinstance(value, _NAMED):
            self._begin("named", getattr(value, "__name__", kind.__name__))
        else:
            self._object(value, kind)

    def _begin(self, what: str, *more: int | str) -> None:
        self.written.append(_MARK + what)
        self.written.extend(more)

    def _pairs(self, what: str, pairs: Iterable[tuple[Any, Any]]) -> None:
        pairs = list(pairs)
        self._begin(what, len(pairs))
        for key, value in pairs:
            self.write(key)
            self.write(value)

    def _object(self, value: Any, kind: type) -> None:
        seen = self._seen
        number = seen.get(id(value))
        if number is not None:
            self._begin("the same", number)
            return
        seen[id(value)] = len(seen)
        if kind is types.CoroutineType:
            self._frames(value)
        elif hasattr(kind, "frames"):
            for frame in value.frames():
                self._frame(frame)
            self._begin("runs")
        elif kind is types.FunctionType:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            self._begin("function", value.__qualname__)
            self.write(cells)
        elif kind is types.MethodType:
            self._kept.append(value)  # a bound method is made anew each time; its id must not be used again
            self._begin("method", value.__func__.__qualname__)
            self.write(value.__self__)
        elif kind is functools.partial:
            self._begin("partial")
            self.write(value.func)
            self.write(value.args)
            self.write(value.keywords)
        else:
            self._attributes(value, kind)

    def _frames(self, work: Any) -> None:
        """Where a coroutine stands, and where those stand that it awaits."""
        while work is not None:
            frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
            if frame is None:
                self._begin("awaits", type(work).__name__)
                return
            self._frame(frame)
            work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
        self._begin("runs")

    def _frame(self, frame: types.FrameType) -> None:
        self._begin("frame", frame.f_code.co_qualname, frame.f_lasti)
        self._pairs("variables", frame.f_locals.items())

    def _attributes(self, value: Any, kind: type) -> None:
        pairs = [(name, getattr(value, name)) for name in _slots(kind) if hasattr(value, name)]
        pairs += [pair for pair in getattr(value, "__dict__", {}).items() if pair[0] not in _PAST]
        if isinstance(value, tuple):
            pairs.append(("items", tuple(value)))
        if isinstance(value, BaseException):
            pairs.append(("args", value.args))
        self._pairs(kind.__qualname__, pairs)


@functools.lru_cache(maxsize=512)
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in kind.__mro__
        for name in getattr(base, "__slots__", ())
        if name not in ("__weakref__", "__dict__") and name not in _PAST
    )
