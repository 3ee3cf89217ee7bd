"""`lockfast show`: all about one lock, with its queue in order."""

from __future__ import annotations

import argparse

from lockfast.cli.common import add_store, as_dict, connect, print_json, shown_name, shown_times
from lockfast.cli.terminal import Line, Terminal
from lockfast.cli.words import ago, who
from lockfast.values import LockInfo, WaiterInfo, clean

MOST_WAITERS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tell all about one lock: who holds it, since when and for how long, and who waits, in order."
    parser.epilog = "examples:\n  $ lockfast show backup\n  $ lockfast show backup --json"
    parser.add_argument("name", help="the lock's name")
    parser.add_argument("--all", action="store_true", help=f"list more than the first {MOST_WAITERS} who wait")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as locks:
        info = locks.lock(args.name).inspect()
    if args.json:
        print_json(as_dict(info, waiters=True))
        return 0
    terminal = Terminal()
    terminal.lines([[(shown_name(info), "bold")], *facts(info), *queue(info, None if args.all else MOST_WAITERS)])
    return 0


def facts(info: LockInfo) -> list[Line]:
    """A line for each thing that is known."""
    lines = [_fact("state", *_state(info))]
    if info.locked:
        held, left = shown_times(info)
        lines.append(_fact("holder", who(info.owner)))
        lines.append(_fact("holder id", clean(info.holder or ""), "dim"))
        lines.append(_fact("held for", held if info.held_for is not None else "unknown"))
        if info.ttl_left is None:
            lines.append(_fact("ttl left", "none: if its holder dies, nobody frees it but lockfast break", "red"))
        else:
            lines.append(_fact("ttl left", left))
    lines.append(_fact("fence", "never granted by lockfast" if info.fence is None else str(info.fence)))
    return lines


def _state(info: LockInfo) -> tuple[str, str]:
    if not info.locked:
        return "free", "green"
    return ("held", "yellow") if info.owner is not None else ("held by another program than lockfast", "yellow")


def _fact(what: str, value: str, style: str = "") -> Line:
    return [(f"  {what:<11}", "dim"), (value, style)]


def queue(info: LockInfo, most: int | None) -> list[Line]:
    """Who waits, first come first."""
    if not info.waiting:
        return [_fact("waiting", "nobody")]
    shown = info.waiters[:most]
    lines = [_fact("waiting", str(info.waiting), "yellow"), *(_place(at, one) for at, one in enumerate(shown, 1))]
    if info.waiting > len(shown):
        lines.append([(f"  {'':<11}and {info.waiting - len(shown)} more", "dim")])
    return lines


def _place(place: int, waiter: WaiterInfo) -> Line:
    return [(f"  {place:>9}  ", "dim"), (who(waiter.owner), ""), (f", for {ago(waiter.waiting_for)}", "dim")]
