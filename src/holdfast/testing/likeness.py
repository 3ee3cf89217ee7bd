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
import types
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from holdfast.testing.process import Process

_PLAIN = (int, float, str, bytes, type(None))
_PAST = frozenset({"sent", "notes", "chance", "_current"})


def likeness(process: Process) -> Any:
    """The value; hashable."""
    return _Writer().write(process)


class _Writer:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN or kind is bool:
            return value
        if kind is list or kind is tuple or kind is deque:
            return kind.__name__, tuple([self.write(one) for one in value])
        if kind is dict:
            return tuple([(self.write(key), self.write(one)) for key, one in value.items()])
        if kind is set or kind is frozenset:
            return frozenset(value)
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | logging.Logger | weakref.ref):
            return getattr(value, "__name__", kind.__name__)
        return self._object(value)

    def _object(self, value: Any) -> Any:
        number = self._seen.get(id(value))
        if number is not None:
            return "the same", number
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, types.CoroutineType):
            return "coroutine", self._frames(value)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return value.__qualname__, tuple([self.write(cell) for cell in cells])
        if isinstance(value, types.MethodType):
            self._kept.append(value)  # a bound method is made anew each time; its id must not be used again
            return value.__func__.__qualname__, self.write(value.__self__)
        if isinstance(value, functools.partial):
            return "partial", self.write(value.func), self.write(value.args)
        return type(value).__qualname__, tuple(
            [(name, self.write(one)) for name, one in _attributes(value).items() if name not in _PAST]
        )

    def _frames(self, work: Any) -> tuple[Any, ...]:
        """Where a coroutine stands, and where those stand that it awaits."""
        found: list[tuple[Any, ...]] = []
        while work is not None:
            frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
            if frame is None:
                found.append((type(work).__name__,))
                break
            variables = tuple([(name, self.write(one)) for name, one in frame.f_locals.items()])
            found.append((frame.f_code.co_qualname, frame.f_lasti, variables))
            work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
        return tuple(found)


@functools.lru_cache(maxsize=512)
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in kind.__mro__
        for name in getattr(base, "__slots__", ())
        if name not in ("__weakref__", "__dict__")
    )


def _attributes(value: Any) -> Mapping[str, Any]:
    found = {name: getattr(value, name) for name in _slots(value.__class__) if hasattr(value, name)}
    found.update(getattr(value, "__dict__", {}))
    if isinstance(value, tuple):
        found["items"] = tuple(value)
    if isinstance(value, BaseException):
        found["args"] = value.args
    return found
