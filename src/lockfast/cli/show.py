"""`lockfast show`: one lock, its holders and its queue."""

from __future__ import annotations

import argparse

from lockfast.cli.arguments import add_store, connect, print_json
from lockfast.cli.terminal import Line, Terminal
from lockfast.cli.view import as_dict, duration, is_shared, mode_text, owner_text, times
from lockfast.values import LockInfo, Mode, clean

MAX_SHOWN = 20  # holders, and waiters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show one lock: its holders, hold times, ttls, fences, and the queue in order."
    parser.epilog = "examples:\n  $ lockfast show backup\n  $ lockfast show backup --json"
    parser.add_argument("name", help="the lock's name")
    parser.add_argument("--all", action="store_true", help=f"list all holders and waiters, not only {MAX_SHOWN}")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as locks:
        info = locks.lock(args.name).inspect()
    if args.json:
        print_json(as_dict(info, waiters=True))
        return 0
    limit = None if args.all else MAX_SHOWN
    facts = _holders(info, limit) if info.mode in (Mode.READ, Mode.PERMITS) else _facts(info)
    Terminal().lines([[(clean(info.name), "bold")], *facts, *_queue(info, limit)])
    return 0


def _facts(info: LockInfo) -> list[Line]:
    fence = _fact("fence", "never granted by lockfast" if info.fence is None else str(info.fence))
    if not info.locked:
        return [_fact("state", "free", "green"), fence]
    held, left = times(info.holders[0])
    endless = ("none: if the holder dies, use lockfast force-release", "red")
    return [
        _fact("state", "held by another program than lockfast" if info.owner is None else "held", "yellow"),
        _fact("holder", owner_text(info.owner)),
        _fact("holder id", clean(info.holder or ""), "dim"),
        _fact("held for", "unknown" if info.held_for is None else held),
        _fact("ttl left", *((left,) if info.ttl_left is not None else endless)),
        fence,
    ]


def _holders(info: LockInfo, limit: int | None) -> list[Line]:
    """The holders of a lock that is shared, three lines each."""
    count, reading = len(info.holders), info.mode is Mode.READ
    permits = f"in use: {info.permits} permit{'s' if info.permits > 1 else ''}"
    lines = [
        _fact("state", "held to read" if reading else permits, "yellow"),
        _fact("fence", str(info.fence)),
        _fact("readers" if reading else "holders", str(count)),
    ]
    for number, one in enumerate(info.holders[:limit], 1):
        held, left = times(one)
        slots = "" if reading else f"{mode_text(one)}, "
        lines.append([(f"  {number:>9}  ", "dim"), (owner_text(one.owner), "")])
        lines.append([(f"  {'':<11}{slots}held for {held}, ttl left {left}, fence {one.fence}", "dim")])
        lines.append([(f"  {'':<11}holder id {clean(one.holder)}", "dim")])
    return lines + _rest(count - len(info.holders[:limit]))


def _queue(info: LockInfo, limit: int | None) -> list[Line]:
    if not info.waiting:
        return [_fact("waiting", "none")]
    shown = info.waiters[:limit]
    lines = [_fact("waiting", str(info.waiting), "yellow")]
    for position, waiter in enumerate(shown, 1):
        mode = f", {mode_text(waiter)}" if is_shared(info) else ""
        waited = f"{mode}, for {duration(waiter.waiting_for)}"
        lines.append([(f"  {position:>9}  ", "dim"), (owner_text(waiter.owner), ""), (waited, "dim")])
    return lines + _rest(info.waiting - len(shown))


def _rest(count: int) -> list[Line]:
    return [[(f"  {'':<11}and {count} more", "dim")]] if count > 0 else []


def _fact(label: str, value: str, style: str = "") -> Line:
    return [(f"  {label:<11}", "dim"), (value, style)]
