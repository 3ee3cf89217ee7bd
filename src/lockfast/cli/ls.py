"""`lockfast ls`: every lock that somebody holds or waits for."""

from __future__ import annotations

import argparse

from lockfast.cli.common import add_store, as_dict, connect, print_json
from lockfast.cli.table import SORTS, lock_table, sorted_by
from lockfast.cli.terminal import Terminal
from lockfast.values import clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the locks that somebody holds or waits for. A lock that another program than\n"
        "lockfast took is found only by its full name."
    )
    parser.epilog = (
        "examples:\n  $ lockfast ls\n  $ lockfast ls 'report:*' --sort waiting\n"
        "  $ lockfast ls --json | jq -r '.[] | select(.waiting > 5) | .name'"
    )
    parser.add_argument(
        "pattern", nargs="?", default="*", help="a name, or a pattern with * ? [ab]; quote it for the shell"
    )
    parser.add_argument("-a", "--all", action="store_true", help="also those that are free and were used within a day")
    parser.add_argument("--sort", choices=list(SORTS), default="name", help="by name, age or number of waiters")
    parser.add_argument("--names", action="store_true", help="print only the names, one a line")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as locks:
        infos = sorted_by(list(locks.list(args.pattern, free=args.all)), args.sort)
    if args.json:
        print_json([as_dict(info, waiters=False) for info in infos])
    elif args.names:
        for info in infos:
            print(clean(info.name, 2000))
    else:
        terminal = Terminal()
        if infos:
            terminal.lines(lock_table(terminal, infos))
        else:
            terminal.say("No lock is held or waited for." if args.pattern == "*" else "No such lock is held.", "dim")
    return 0
