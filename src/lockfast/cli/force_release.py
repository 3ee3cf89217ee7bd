"""`lockfast force-release`: end another holder's lease.

Only the holder that was shown loses the lock. Without a terminal to confirm on, `--yes` is required.
"""

from __future__ import annotations

import argparse
import sys

from lockfast.cli.arguments import add_store, connect, print_json
from lockfast.cli.main import FAILED, USAGE, report
from lockfast.cli.terminal import Terminal
from lockfast.cli.view import as_dict, owner_text, times
from lockfast.values import LockInfo, clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "End the lease of a lock's holder and grant the lock to the first waiter. The\n"
        "holder is notified, but it may still be working: only a resource that checks\n"
        "the fence rejects its late writes. `lockfast run` terminates its command."
    )
    parser.epilog = (
        "exit codes: 0 released, 1 nothing to release, 2 wrong usage\n\n"
        "examples:\n  $ lockfast force-release backup\n  $ lockfast force-release backup --yes --json"
    )
    parser.add_argument("name", help="the lock's name")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--holder", help="only if this holder id (see lockfast show) still holds the lock")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as locks:
        lock = locks.lock(args.name)
        seen = lock.inspect()
        if not seen.locked:
            return _nothing(args, f"{args.name!a} is free; there is nothing to release.")
        if args.holder is not None and seen.holder != args.holder:
            return _nothing(args, f"{args.name!a} is held by a different holder id; nothing was changed.")
        if not args.yes and not _confirmed(seen):
            return FAILED if sys.stdin.isatty() else USAGE
        released = lock.force_release(seen.holder)
        if released is None:
            return _nothing(args, f"{args.name!a} has a new holder by now; nothing was changed.")
        after = lock.inspect()
    if args.json:
        print_json({"released": as_dict(released, waiters=False), "now": as_dict(after, waiters=False)})
        return 0
    terminal = Terminal()
    terminal.say(f"{clean(args.name)} is no longer held by {owner_text(released.owner)}.", "bold")
    if after.locked:
        terminal.say(f"{owner_text(after.owner)} holds it now, with fence {after.fence}.")
    else:
        terminal.say("There were no waiters: the lock is free.")
    return 0


def _nothing(args: argparse.Namespace, message: str) -> int:
    if args.json:
        print_json({"released": None})
        return FAILED
    return report(message, FAILED)


def _confirmed(seen: LockInfo) -> bool:
    held, left = times(seen)
    holder = f"held by {owner_text(seen.owner)} for {held}"
    print(f"{clean(seen.name)} is {holder}, ttl left {left}; {seen.waiting} waiting.", file=sys.stderr)
    if not sys.stdin.isatty():
        report("there is no terminal to confirm on; use --yes to release the lock anyway.", USAGE)
        return False
    print("End this lease? The holder may still be working. [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
