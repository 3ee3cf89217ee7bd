"""`lockfast show`: one lock, its holder and its queue."""

from __future__ import annotations

import argparse

from lockfast.cli.arguments import add_store, connect, print_json
from lockfast.cli.terminal import Line, Terminal
from lockfast.cli.view import as_dict, duration, owner_text, times
from lockfast.values import LockInfo, clean

MAX_WAITERS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show one lock: its holder, hold time, ttl, fence, and the queue in order."
    parser.epilog = "examples:\n  $ lockfast show backup\n  $ lockfast show backup --json"
    parser.add_argument("name", help="the lock's name")
    parser.add_argument("--all", action="store_true", help=f"list all waiters, not only the first {MAX_WAITERS}")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as locks:
        info = locks.lock(args.name).inspect()
    if args.json:
        print_json(as_dict(info, waiters=True))
        return 0
    waiters = _queue(info, None if args.all else MAX_WAITERS)
    Terminal().lines([[(clean(info.name), "bold")], *_facts(info), *waiters])
    return 0


def _facts(info: LockInfo) -> list[Line]:
    fence = _fact("fence", "never granted by lockfast" if info.fence is None else str(info.fence))
    if not info.locked:
        return [_fact("state", "free", "green"), fence]
    held, left = times(info)
    endless = ("none: if the holder dies, use lockfast force-release", "red")
    return [
        _fact("state", "held by another program than lockfast" if info.owner is None else "held", "yellow"),
        _fact("holder", owner_text(info.owner)),
        _fact("holder id", clean(info.holder or ""), "dim"),
        _fact("held for", "unknown" if info.held_for is None else held),
        _fact("ttl left", *((left,) if info.ttl_left is not None else endless)),
        fence,
    ]


def _queue(info: LockInfo, limit: int | None) -> list[Line]:
    if not info.waiting:
        return [_fact("waiting", "none")]
    shown = info.waiters[:limit]
    lines: list[Line] = [_fact("waiting", str(info.waiting), "yellow")]
    for position, waiter in enumerate(shown, 1):
        waited = f", for {duration(waiter.waiting_for)}"
        lines.append([(f"  {position:>9}  ", "dim"), (owner_text(waiter.owner), ""), (waited, "dim")])
    if info.waiting > len(shown):
        lines.append([(f"  {'':<11}and {info.waiting - len(shown)} more", "dim")])
    return lines


def _fact(label: str, value: str, style: str = "") -> Line:
    return [(f"  {label:<11}", "dim"), (value, style)]
