"""What the commands for operators share: the store to speak to, one connection, and locks as rows and as JSON.

Rules kept here: names and labels were chosen by strangers, so they are cleaned before they are shown; JSON has them as
they are, escaped.
"""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

import lockfast
from lockfast.cli.words import ago, who
from lockfast.values import LockInfo, Owner, clean

STORE_TIMEOUT = 3.0
"""Seconds until a store that does not answer is called unavailable."""


def add_store(parser: argparse.ArgumentParser, *, as_json: bool = True) -> None:
    """`--url`, and `--json` where a program may read."""
    parser.add_argument(
        "--url",
        help="the store: redis://, rediss://, valkey://, unix://, sqlite:///path "
        "(default: $LOCKFAST_URL, else the embedded store)",
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def connect(args: argparse.Namespace, **options: Any) -> lockfast.Locks:
    """The locks that the command is about. What the library would log, the command says itself."""
    logging.getLogger("lockfast").setLevel(logging.ERROR)
    return lockfast.connect(args.url, label="lockfast command", store_timeout=STORE_TIMEOUT, **options)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def as_dict(info: LockInfo, *, waiters: bool) -> dict[str, Any]:
    """A lock for programs; times in seconds."""
    found: dict[str, Any] = {
        "name": info.name,
        "locked": info.locked,
        "holder": info.holder,
        "owner": _owner(info.owner),
        "fence": info.fence,
        "held_for": _rounded(info.held_for),
        "ttl_left": _rounded(info.ttl_left),
        "waiting": info.waiting,
    }
    if waiters:
        found["waiters"] = [
            {"holder": one.holder, "owner": _owner(one.owner), "waiting_for": _rounded(one.waiting_for)}
            for one in info.waiters
        ]
    return found


def _owner(owner: Owner | None) -> dict[str, Any] | None:
    return None if owner is None else owner._asdict()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def shown_name(info: LockInfo) -> str:
    return clean(info.name)


def shown_holder(info: LockInfo) -> str:
    return who(info.owner) if info.locked else "free"


def shown_times(info: LockInfo) -> tuple[str, str]:
    """How long it has been held, and how long its ttl still lasts."""
    if not info.locked:
        return "", ""
    held = "?" if info.held_for is None else ago(info.held_for)
    return held, "none" if info.ttl_left is None else ago(info.ttl_left)
