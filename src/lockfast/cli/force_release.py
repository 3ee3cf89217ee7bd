"""`lockfast force-release`: end the leases of other holders.

Only the holders that were shown lose the lock. Without a terminal to confirm on, `--yes` is required.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lockfast.cli.arguments import add_store, connect, print_json
from lockfast.cli.main import FAILED, USAGE, report
from lockfast.cli.terminal import Terminal
from lockfast.cli.view import as_dict, holders_text, mode_text, owner_text, times
from lockfast.values import HolderInfo, LockInfo, Mode, clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "End the lease of a lock's holder, or of all readers or all holders of permits,\n"
        "and grant the lock to the next waiters. The holder is notified, but it may\n"
        "still be working: only a resource that checks the fence rejects its late\n"
        "writes. `lockfast run` terminates its command."
    )
    parser.epilog = (
        "exit codes: 0 released, 1 nothing to release, 2 wrong usage\n\n"
        "examples:\n  $ lockfast force-release backup\n  $ lockfast force-release backup --yes --json\n"
        "  $ lockfast force-release gpu --holder 5CvFkQ3nTzqyQH1hq3HQmg"
    )
    parser.add_argument("name", help="the lock's name")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--holder", help="only the lease with this holder id (see lockfast show)")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as locks:
        lock = locks.lock(args.name)
        seen = lock.inspect()
        if not seen.locked:
            return _nothing(args, f"{args.name!a} is free; there is nothing to release.")
        chosen = [one for one in seen.holders if args.holder in (None, one.holder)]
        if not chosen:
            return _nothing(args, f"{args.name!a} is held by a different holder id; nothing was changed.")
        if not args.yes and not _confirmed(seen, chosen):
            return FAILED if sys.stdin.isatty() else USAGE
        released = [one for one in chosen if lock.force_release(one.holder) is not None]
        if not released:
            return _nothing(args, f"{args.name!a} has a new holder by now; nothing was changed.")
        after = lock.inspect()
    if args.json:
        before = as_dict(seen._replace(holders=tuple(released)), waiters=False)
        print_json({"released": before, "now": as_dict(after, waiters=False)})
        return 0
    _say(released, after)
    return 0


def _say(released: Sequence[HolderInfo], after: LockInfo) -> None:
    terminal = Terminal()
    for one in released:
        terminal.say(f"{clean(after.name)} is no longer held by {owner_text(one.owner)}.", "bold")
    if after.mode is Mode.EXCLUSIVE:
        terminal.say(f"{owner_text(after.owner)} holds it now, with fence {after.fence}.")
    elif after.locked:
        terminal.say(f"It is held by {holders_text(after)} now.")
    else:
        terminal.say("The lock is free now.")


def _nothing(args: argparse.Namespace, message: str) -> int:
    if args.json:
        print_json({"released": None})
        return FAILED
    return report(message, FAILED)


def _confirmed(seen: LockInfo, chosen: Sequence[HolderInfo]) -> bool:
    name = clean(seen.name)
    for one in chosen:
        held, left = times(one)
        mode = "" if one.mode is Mode.EXCLUSIVE else f" ({mode_text(one)})"
        end = f"; {seen.waiting} waiting." if one is chosen[-1] else ";"
        print(f"{name}{mode} is held by {owner_text(one.owner)} for {held}, ttl left {left}{end}", file=sys.stderr)
    if not sys.stdin.isatty():
        report("there is no terminal to confirm on; use --yes to release the lock anyway.", USAGE)
        return False
    what = "this lease? The holder" if len(chosen) == 1 else f"these {len(chosen)} leases? The holders"
    print(f"End {what} may still be working. [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
