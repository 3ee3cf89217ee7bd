"""The command's entry: which sub-commands there are, and how each of them ends.

Rules kept here: only the sub-command that was asked for is loaded, so that the others cost nothing; what users can
cause or mend (a wrong option, a store that does not answer, Ctrl-C) ends in one sentence on stderr and an exit code,
never in a traceback. The codes: 0 done, 1 failed, 2 called wrongly, 130 interrupted, 141 nobody reads any more.

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int`, and one line in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import NamedTuple, NoReturn

from holdfast._version import __version__
from holdfast.errors import LockError

FAILED, CALLED_WRONGLY, INTERRUPTED, NO_READER = 1, 2, 130, 141


class Command(NamedTuple):
    """A sub-command that is not loaded yet; `example` is a line to type."""

    module: str
    summary: str
    example: str


COMMANDS = {
    "demo": Command("holdfast.cli.demo.command", "show the lock at work, in about ten seconds", "holdfast demo"),
}


class Parser(argparse.ArgumentParser):
    """Answers a wrong call in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(CALLED_WRONGLY, f"{self.prog}: {message}. Try {self.prog} --help.\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command with these arguments (by default the process's own) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        parser = _parser(argv)
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help(sys.stderr)
            return CALLED_WRONGLY
        code: int = args.run(args)
        sys.stdout.flush()  # here, where a reader who has left is still an answer and not a traceback
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal has written ^C
        return _say("interrupted.", INTERRUPTED)
    except BrokenPipeError:
        return _no_reader()
    except (LockError, OSError) as error:
        return _say(str(error), FAILED)
    return code


def _parser(argv: list[str]) -> Parser:
    asked_for = next((arg for arg in argv if not arg.startswith("-")), None)
    parser = Parser(
        prog="holdfast",
        description="A lock that several processes on several machines can trust.",
        epilog="example:\n" + "\n".join(f"  $ {command.example}" for command in COMMANDS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="holdfast")
    for name, command in COMMANDS.items():
        below = choices.add_parser(name, help=command.summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == asked_for:
            module = import_module(command.module)
            module.add_arguments(below)
            below.set_defaults(run=module.run)
    return parser


def _say(sentence: str, code: int) -> int:
    try:
        print(f"holdfast: {sentence}", file=sys.stderr)
    except OSError:
        pass  # nobody can be told, and the code says it all the same
    return code


def _no_reader() -> int:
    """As after `holdfast ... | head`: what is still buffered goes nowhere, or the interpreter would complain of it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return NO_READER
