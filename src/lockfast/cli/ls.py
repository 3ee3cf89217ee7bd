"""`lockfast ls`: list the locks that are held or waited for."""

from __future__ import annotations

import argparse

from lockfast.cli.arguments import add_store, connect, print_json
from lockfast.cli.terminal import Terminal
from lockfast.cli.view import SORTS, as_dict, lock_table
from lockfast.values import clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the locks that are held or waited for. A lock that another program than\n"
        "lockfast acquired is found only by its full name."
    )
    parser.epilog = (
        "examples:\n  $ lockfast ls\n  $ lockfast ls 'report:*' --sort waiting\n"
        "  $ lockfast ls --json | jq -r '.[] | select(.waiting > 5) | .name'"
    )
    parser.add_argument("pattern", nargs="?", default="*", help="a name, or a quoted pattern with * ? [ab]")
    parser.add_argument("-a", "--all", action="store_true", help="include free locks that were used within a day")
    parser.add_argument("--sort", choices=list(SORTS), default="name", help="by name, age or number of waiters")
    parser.add_argument("--names", action="store_true", help="print only the names, one per line")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    terminal = Terminal()
    with connect(args) as locks:
        infos = sorted(locks.list(args.pattern, free=args.all), key=SORTS[args.sort])
    if args.json:
        print_json([as_dict(info, waiters=False) for info in infos])
    elif args.names:
        for info in infos:
            print(clean(info.name, 2000))
    elif infos:
        terminal.lines(lock_table(terminal, infos))
    else:
        every = args.pattern == "*"
        terminal.say("No lock is held or waited for." if every else "No matching lock is held.", "dim")
    return 0
