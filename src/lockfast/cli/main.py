"""The command's entry: which sub-commands there are, and how each of them ends.

Rules kept here: only the sub-command that was asked for is loaded, so that the others cost nothing; what users can
cause or mend (a wrong option, a store that does not answer, Ctrl-C) ends in one sentence on stderr and an exit code,
never in a traceback. The codes: 0 done, 1 failed, 2 called wrongly, 70 a fault of ours, 130 interrupted, 141 nobody
reads any more;
`lockfast run` has more of them.

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int`, and one line in `COMMANDS`. `run` alone
reads its words itself: it is started often, and loading argparse would take longer than it does.
"""

from __future__ import annotations

import os
import sys

from lockfast._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser
    from typing import NoReturn

FAILED, CALLED_WRONGLY, FAULT, INTERRUPTED, NO_READER = 1, 2, 70, 130, 141

RUN = "run"
COMMANDS = {
    RUN: ("lockfast.cli.run.command", "run a command under a lock", "lockfast run backup -- ./backup.sh"),
    "ls": ("lockfast.cli.ls", "list the locks that are held or waited for", "lockfast ls 'report:*'"),
    "show": ("lockfast.cli.show", "all about one lock, with its queue", "lockfast show backup"),
    "top": ("lockfast.cli.top", "watch the locks change hands", "lockfast top"),
    "break": ("lockfast.cli.force_release", "take a lock away from its holder", "lockfast break backup"),
    "doctor": ("lockfast.cli.doctor", "check whether the store is fit to keep locks", "lockfast doctor"),
    "bench": ("lockfast.cli.bench", "measure the store, in a few seconds", "lockfast bench"),
    "completion": ("lockfast.cli.completion", "print a script for your shell", 'eval "$(lockfast completion bash)"'),
    "demo": ("lockfast.cli.demo.command", "show the lock at work, in about ten seconds", "lockfast demo"),
}
"""For each sub-command its module, what it does, and a line to type."""


def main(argv: list[str] | None = None) -> int:
    """Run the command with these arguments (by default the process's own) and return its exit code."""
    _have_streams()
    own = argv is None
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _run(argv)
        sys.stdout.flush()  # here, where a reader who has left is still an answer and not a traceback
        if own and argv[:1] == [RUN] and "lockfast.client.locks" not in sys.modules:
            os._exit(code)  # nothing is left to do, and taking the interpreter down would take a while
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal has written ^C
        return _say("interrupted.", INTERRUPTED)
    except BrokenPipeError:
        return _no_reader()
    except Exception as error:
        return _failed(error)
    return code


def _have_streams() -> None:
    """Who was started without input or output (a daemon's child, `>&-`) reads nothing and writes to nobody."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the end


def _run(argv: list[str]) -> int:
    if argv[:1] == [RUN]:
        from lockfast.cli.run.command import run

        return run(argv[1:])
    parser = _parser(argv)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return CALLED_WRONGLY
    code: int = args.run(args)
    return code


def _failed(error: Exception) -> int:
    from lockfast.errors import LockError

    if isinstance(error, LockError | OSError):
        return _say(str(error), FAILED)
    if os.environ.get("LOCKFAST_TRACEBACK"):
        raise error
    what = f"{type(error).__name__}: {str(error)[:200]!a}"
    return _say(f"this is a fault of lockfast: {what}. LOCKFAST_TRACEBACK=1 shows where; please report it.", FAULT)


def _parser(argv: list[str]) -> ArgumentParser:
    import argparse
    from importlib import import_module

    class Parser(argparse.ArgumentParser):
        """Answers a wrong call in one sentence."""

        def error(self, message: str) -> NoReturn:
            self.exit(CALLED_WRONGLY, f"{self.prog}: {message}. Try {self.prog} --help.\n")

    how = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="lockfast",
        description="A lock that several processes on several machines can trust.",
        epilog="examples:\n" + "\n".join(f"  $ {example}" for _, _, example in COMMANDS.values()),
        formatter_class=how,
    )
    parser.add_argument("--version", action="version", version=f"lockfast {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="lockfast")
    asked_for = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, (module, summary, example) in COMMANDS.items():
        below = choices.add_parser(name, help=summary, epilog=f"example:\n  $ {example}", formatter_class=how)
        if name == asked_for and name != RUN:
            loaded = import_module(module)
            loaded.add_arguments(below)
            below.set_defaults(run=loaded.run)
    return parser


def _say(sentence: str, code: int) -> int:
    try:
        print(f"lockfast: {sentence}", file=sys.stderr)
    except OSError:
        pass  # nobody can be told, and the code says it all the same
    return code


def _no_reader() -> int:
    """As after `lockfast ... | head`: what is still buffered goes nowhere, or the interpreter would complain of it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return NO_READER
