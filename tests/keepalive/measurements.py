"""Measured values, which `conftest.py` shows at the end of the run: the worst of each kind, and their number."""

from collections import defaultdict

_values: dict[tuple[str, str], list[float]] = defaultdict(list)


def note(name: str, value: float, unit: str = "ms") -> float:
    """Record one value, and return it."""
    _values[name, unit].append(value)
    return value


def lines() -> list[str]:
    return [
        f"{name}: at most {max(values):.3g} {unit} ({len(values)} measured)"
        for (name, unit), values in sorted(_values.items())
    ]
