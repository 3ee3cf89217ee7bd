"""Functions under a lock: which functions a lock can guard, and the lock's name for each call.

Rules: a function that cannot work is refused where the decorator stands, not at the first call. So is a function that
would only start under the lock and continue without it: a generator, or a function of the other flavour.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec

from lockfast.errors import ConfigurationError, shown
from lockfast.values import lock_name

P = ParamSpec("P")

NameOf = str | Callable[..., str]
"""A lock's name: a template such as "account:{account_id}", or a function of the call's arguments."""


def check_function(function: Any, *, is_async: bool) -> None:
    """Refuse a function that would not run to its end under the lock."""
    import inspect

    if not callable(function):
        raise ConfigurationError(f"A lock guards a function, not {shown(function)}.")
    called = function if inspect.isroutine(function) else getattr(function, "func", type(function).__call__)
    if any(
        is_generator(one)
        for is_generator in (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        for one in (function, called)
    ):
        raise ConfigurationError(
            f"A lock can't guard the generator function {shown(_name(function))}: it would continue after the release. "
            "Acquire the lock in a `with` block inside it."
        )
    if any(map(inspect.iscoroutinefunction, (function, called))) is not is_async:
        use = (
            "a coroutine function (async def)"
            if is_async
            else "a plain function; lockfast.aio guards coroutine functions"
        )
        raise ConfigurationError(f"This lock guards {use}, which {shown(_name(function))} is not.")


def guarded(function: Callable[P, Any], block: Callable[P, Any]) -> Callable[P, Any]:
    """Wrap `function`: each call runs inside `with block(...)`. If that yields a false value, the call returns it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        with block(*args, **kwargs) as lease:
            return function(*args, **kwargs) if lease else lease

    return call


def guarded_async(
    function: Callable[P, Awaitable[Any]], block: Callable[P, Any]
) -> Callable[P, Coroutine[Any, Any, Any]]:
    """Wrap a coroutine function in the same way, with `async with`."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        async with block(*args, **kwargs) as lease:
            return await function(*args, **kwargs) if lease else lease

    return call


def name_function(name: NameOf, function: Callable[..., Any]) -> Callable[..., str]:
    """Return a function from the arguments of a call of `function` to the lock's name."""
    if callable(name):
        return name
    import inspect

    template = lock_name(name)
    signature = inspect.signature(function)
    fields = _fields(template)
    for field in fields:
        if field not in signature.parameters:
            raise _template_error(template, f"the function has no argument {shown(field)}")
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter.name for parameter in signature.parameters.values() if parameter.kind in plain]
    simple = set(fields) <= set(positional)

    def name_of(*args: Any, **kwargs: Any) -> str:
        values = kwargs | dict(zip(positional, args, strict=False))
        if not simple or not values.keys() >= set(fields):  # defaults, *args and **kwargs; and calls that do not fit
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = bound.arguments
        try:
            return template.format(**values)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _template_error(template, str(error)) from error

    return name_of


def _fields(template: str) -> list[str]:
    """The arguments that a template names."""
    import string

    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _template_error(template, str(error)) from error
    return [field.partition(".")[0].partition("[")[0] for _, field, _, _ in parts if field is not None]


def _template_error(template: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"The lock's name {shown(template)} can't be made from the call: {shown(why)}. Name arguments of the function "
        'in braces, as in "account:{account_id}", write {{ and }} for braces, or pass a function that returns the name.'
    )


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
