"""`lockfast break`: take a lock away from its holder.

Rules kept here: nobody is hit but the holder that was shown; without a person to ask, `--yes` must have been given.
"""

from __future__ import annotations

import argparse
import sys

import lockfast
from lockfast.cli.common import add_store, as_dict, connect, print_json, shown_times
from lockfast.cli.terminal import Terminal
from lockfast.cli.words import who
from lockfast.values import LockInfo, clean

DONE, NOTHING_DONE, CALLED_WRONGLY = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Take a lock away from its holder and give it to the next in the queue. The holder is told that\n"
        "it lost the lock, but it may still be at work: what it writes is kept out only by a\n"
        "resource that checks the fence. A command under `lockfast run` is ended."
    )
    parser.epilog = (
        "exit codes: 0 taken away, 1 nothing to take away, 2 called wrongly\n\n"
        "examples:\n  $ lockfast break backup\n  $ lockfast break backup --yes --json"
    )
    parser.add_argument("name", help="the lock's name")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--holder", help="only if this holder id (see lockfast show) still has it")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as locks:
        lock = locks.lock(args.name)
        seen = lock.inspect()
        if not seen.locked:
            return _nothing(args, f"{args.name!a} is free: nobody holds it.")
        if args.holder is not None and seen.holder != args.holder:
            return _nothing(args, f"{args.name!a} is held by another than that holder; nothing was changed.")
        if not args.yes and not _confirmed(seen):
            return CALLED_WRONGLY if not sys.stdin.isatty() else NOTHING_DONE
        return _break(args, lock, seen)


def _break(args: argparse.Namespace, lock: lockfast.Lock, seen: LockInfo) -> int:
    broken = lock.force_release(seen.holder)
    if broken is None:
        return _nothing(args, f"{args.name!a} changed hands meanwhile; nothing was changed.")
    after = lock.inspect()
    if args.json:
        print_json({"broken": as_dict(broken, waiters=False), "now": as_dict(after, waiters=False)})
        return DONE
    terminal = Terminal()
    terminal.say(f"{clean(args.name)} was taken away from {who(broken.owner)}.", "bold")
    if after.locked:
        terminal.say(f"{who(after.owner)} holds it now, with fence {after.fence}.")
    else:
        terminal.say("Nobody waited for it: it is free.")
    return DONE


def _nothing(args: argparse.Namespace, sentence: str) -> int:
    if args.json:
        print_json({"broken": None})
    else:
        print(f"lockfast: {sentence}", file=sys.stderr)
    return NOTHING_DONE


def _confirmed(seen: LockInfo) -> bool:
    held, left = shown_times(seen)
    print(
        f"{clean(seen.name)} is held by {who(seen.owner)} for {held}, ttl left {left}; {seen.waiting} waiting.",
        file=sys.stderr,
    )
    if not sys.stdin.isatty():
        print("lockfast: give --yes to take it away: there is nobody here to ask.", file=sys.stderr)
        return False
    print("Take it away? It may still be at work. [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
