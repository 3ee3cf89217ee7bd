"""Plant errors in the shipped Python and Lua for the duration of a `with` block."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from typing import Any

from lockfast.stores.redis import store
from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.protocol.resp import bulks


@contextmanager
def lua(script: str, old: str, new: str) -> Iterator[None]:
    """Replace `old` by `new` in a shipped script."""
    target = getattr(scripts, script.upper())
    before = dict(vars(target))
    text = replaced(target.text.decode(), old, new).encode()
    digest = sha1(text, usedforsecurity=False).hexdigest().encode()
    target.text = text
    target.digest = digest.decode()
    target._by_digest = bulks(b"EVALSHA", digest)
    target._by_text = bulks(b"EVAL", text)
    _clear_caches()
    try:
        yield
    finally:
        vars(target).update(before)
        _clear_caches()


def _clear_caches() -> None:
    for value in (*vars(scripts).values(), *vars(store).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@contextmanager
def python(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """Replace `old` by `new` in a function of a module or a method of a class, wherever it has been imported."""
    function: Any = inspect.unwrap(getattr(owner, name))
    source = replaced(textwrap.dedent(inspect.getsource(function)), old, new)
    namespace: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source, f"<mutant of {name}>", "exec")
    exec(code, function.__globals__, namespace)
    original, function.__code__ = function.__code__, namespace[name].__code__
    try:
        yield
    finally:
        function.__code__ = original


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class: a constant, a function or a method."""
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise AssertionError(f"the mutant no longer applies: {old!r} occurs {text.count(old)} times")
    return text.replace(old, new)
