"""Functions under a lock: which lock a call takes, and which functions a lock can guard at all.

Rules kept here: what cannot work is refused where the decorator stands, not at the first call; a function that would
only begin under the lock (a generator, or one of the other colour) and run on without it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockfast.errors import ConfigurationError
from lockfast.values import lock_name, shown

NameOf = str | Callable[..., str]
"""A lock's name: text with fields such as "account:{account_id}", or a function of the call's arguments."""


def check_function(function: Any, *, awaited: bool) -> None:
    """Refuse what would not run to its end under the lock."""
    import inspect

    if not callable(function):
        raise ConfigurationError(f"A lock guards a function, not {shown(function)}.")
    called = function if inspect.isroutine(function) else getattr(function, "func", type(function).__call__)
    if any(
        begins(one)
        for begins in (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        for one in (function, called)
    ):
        raise ConfigurationError(
            f"A lock can't guard the generator function {shown(_name(function))}: it would run on after the lock was "
            "given back. Take the lock with a `with` block inside it."
        )
    if any(map(inspect.iscoroutinefunction, (function, called))) is not awaited:
        use = (
            "a coroutine function (async def)"
            if awaited
            else "a plain function; lockfast.aio guards coroutine functions"
        )
        raise ConfigurationError(f"This lock guards {use}, which {shown(_name(function))} is not.")


def name_function(name: NameOf, function: Callable[..., Any]) -> Callable[..., str]:
    """A function from the arguments of a call of `function` to the lock's name."""
    if callable(name):
        return name
    import inspect

    template = lock_name(name)
    signature = inspect.signature(function)
    for field in _fields(template):
        if field not in signature.parameters:
            raise _unfit(template, f"the function has no argument {shown(field)}")

    def name_of(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        try:
            return template.format(**bound.arguments)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _unfit(template, str(error)) from error

    return name_of


def _fields(template: str) -> list[str]:
    """The arguments that a template names."""
    import string

    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _unfit(template, str(error)) from error
    return [field.partition(".")[0].partition("[")[0] for _, field, _, _ in parts if field is not None]


def _unfit(template: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"The lock's name {shown(template)} can't be made from the call: {shown(why)}. Name arguments of the function "
        'in braces, as in "account:{account_id}", write {{ and }} for braces, or give a function that returns the name.'
    )


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
