"""Arguments that the operator commands share, the connection they use, and JSON output."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable

import lockfast

STORE_TIMEOUT = 3.0  # seconds until a store that does not answer counts as unavailable


def add_store(parser: argparse.ArgumentParser, *, as_json: bool = True) -> None:
    """Add `--url` and, unless `as_json` is false, `--json`."""
    parser.add_argument(
        "--url",
        help="the store: redis://, rediss://, valkey://, unix://, sqlite:///path "
        "(default: $LOCKFAST_URL, else the embedded store)",
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def in_range(low: float, high: float) -> Callable[[str], float]:
    """An argument type: a number from `low` to `high`."""

    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!a} is not between {low:g} and {high:g}")
        return value

    return number


def connect(args: argparse.Namespace) -> lockfast.Locks:
    """Connect to the store in `--url`. Library warnings are off: the command reports errors itself."""
    logging.getLogger("lockfast").setLevel(logging.ERROR)
    return lockfast.connect(args.url, label="lockfast command", store_timeout=STORE_TIMEOUT)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
