"""Planting errors in the shipped core and Lua, for as long as a `with` block lasts."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from typing import Any

from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.protocol.resp import bulks


@contextmanager
def lua(script: str, old: str, new: str) -> Iterator[None]:
    """Put `new` in the place of `old` in a shipped script."""
    target = getattr(scripts, script.upper())
    before = dict(vars(target))
    text = replaced(target.text.decode(), old, new).encode()
    digest = sha1(text, usedforsecurity=False).hexdigest().encode()
    target.text = text
    target._by_digest = bulks(b"EVALSHA", digest)
    target._by_text = bulks(b"EVAL", text)
    _forget_requests()
    try:
        yield
    finally:
        vars(target).update(before)
        _forget_requests()


def _forget_requests() -> None:
    for value in vars(scripts).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@contextmanager
def python(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """Put `new` in the place of `old` in a function of a module, or a method of a class."""
    original = inspect.getattr_static(owner, name)
    source = replaced(textwrap.dedent(inspect.getsource(original)), old, new)
    module = inspect.getmodule(original)
    made: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + source, f"<mutant of {name}>", "exec"), vars(module), made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def constant(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module's constant another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise AssertionError(f"the mutant no longer fits: {old!r} is there {text.count(old)} times")
    return text.replace(old, new)
