"""Figures that the tests found, shown at the end of the run by `conftest.py`: the worst of each, and their number."""

from collections import defaultdict

_figures: dict[tuple[str, str], list[float]] = defaultdict(list)


def note(what: str, value: float, unit: str = "ms") -> float:
    """Keep one figure; gives it back."""
    _figures[what, unit].append(value)
    return value


def lines() -> list[str]:
    return [
        f"{what}: at most {max(values):.3g} {unit} ({len(values)} measured)"
        for (what, unit), values in sorted(_figures.items())
    ]
