"""Fingerprint of a process: two processes with the same fingerprint behave the same from now on.

A process is a tree of objects and suspended coroutines. The fingerprint is a digest of that tree: plain values as they
are, objects by class and attributes, a coroutine by its code, its current instruction and its variables. History (notes
for a trace, sent requests) is left out. Dead variables are included, so equivalent processes may differ in their
fingerprints, but different processes never share one.
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
_SEQUENCES = frozenset({list, tuple, deque})
_NAMED = (type, types.ModuleType, types.BuiltinFunctionType, logging.Logger, weakref.ref)
_HISTORY = frozenset({"sent", "notes", "random_source", "keepalives", "_current", "_now"})
_MARK = "\0"
"""Prefix of a type tag, which distinguishes it from a value."""


def fingerprint(process: Process) -> bytes:
    """Digest the process; after its end, only the facts that the invariants still need."""
    writer = _Writer()
    if process.over:
        denied = process.denied - process.releasing
        writer.write((process.holder_ids, denied, process.signalled, process.lost(), process.violations))
    else:
        writer.write(process)
    return blake2b(marshal.dumps(writer.written, 2), digest_size=16).digest()


class _Writer:
    """Serializes an object tree: for each object a tag, its number of parts, and the parts."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def write(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.written.append(value)
        elif kind in _SEQUENCES:
            self._tag(kind.__name__, len(value))
            for one in value:
                self.write(one)
        elif kind is dict:
            self._pairs("dict", value.items())
        elif kind is set or kind is frozenset:
            self._tag("set", len(value))
            self.written.extend(sorted(value, key=repr))
        elif isinstance(value, enum.Enum):
            self._tag("enum", value.name)
        elif isinstance(value, _NAMED):
            self._tag("named", getattr(value, "__name__", kind.__name__))
        else:
            self._object(value, kind)

    def _tag(self, kind: str, *details: int | str) -> None:
        self.written.append(_MARK + kind)
        self.written.extend(details)

    def _pairs(self, kind: str, pairs: Iterable[tuple[Any, Any]]) -> None:
        pairs = list(pairs)
        self._tag(kind, len(pairs))
        for key, value in pairs:
            self.write(key)
            self.write(value)

    def _object(self, value: Any, kind: type) -> None:
        seen = self._seen
        number = seen.get(id(value))
        if number is not None:
            self._tag("reference", number)
            return
        seen[id(value)] = len(seen)
        if kind is types.CoroutineType:
            self._coroutine(value)
        elif hasattr(kind, "frames"):
            for frame in value.frames():
                self._frame(frame)
            self._tag("end of frames")
        elif kind is types.FunctionType:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            self._tag("function", value.__qualname__)
            self.write(cells)
        elif kind is types.MethodType:
            self._kept.append(value)  # bound methods are temporary; keeping this one alive keeps its id unique
            self._tag("method", value.__func__.__qualname__)
            self.write(value.__self__)
        elif kind is functools.partial:
            self._tag("partial")
            self.write(value.func)
            self.write(value.args)
            self.write(value.keywords)
        else:
            self._attributes(value, kind)

    def _coroutine(self, work: Any) -> None:
        """Write the frames of a coroutine and of the coroutines that it awaits."""
        while work is not None:
            frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
            if frame is None:
                self._tag("awaits", type(work).__name__)
                return
            self._frame(frame)
            work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
        self._tag("end of frames")

    def _frame(self, frame: types.FrameType) -> None:
        self._tag("frame", frame.f_code.co_qualname, frame.f_lasti)
        self._pairs("variables", frame.f_locals.items())

    def _attributes(self, value: Any, kind: type) -> None:
        pairs = [(name, getattr(value, name)) for name in _slots(kind) if hasattr(value, name)]
        pairs += [pair for pair in getattr(value, "__dict__", {}).items() if pair[0] not in _HISTORY]
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
        if name not in ("__weakref__", "__dict__") and name not in _HISTORY
    )
