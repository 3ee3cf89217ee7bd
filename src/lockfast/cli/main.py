"""Entry point of the `lockfast` command.

Rules:
- Only the requested sub-command is loaded, so the others add nothing to its start-up time.
- An error that a user can cause or fix (a wrong option, an unreachable store, Ctrl-C) ends in one line on stderr and an
  exit code, never in a traceback.
- Exit codes: 0 done, 1 failed, 2 wrong usage, 70 bug in lockfast, 130 interrupted, 141 broken pipe. `lockfast run` has
  more.

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int`, and one line in `COMMANDS`. Only `run`
parses its own arguments: scripts start it often, and loading argparse takes longer than the rest of it.
"""

from __future__ import annotations

import os
import sys

from lockfast._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser
    from typing import Any, NoReturn

FAILED, USAGE, BUG, INTERRUPTED, BROKEN_PIPE = 1, 2, 70, 130, 141

RUN = "run"
COMMANDS = {  # module, summary and example
    RUN: ("lockfast.cli.run", "run a command under a lock", "lockfast run backup -- ./backup.sh"),
    "ls": ("lockfast.cli.ls", "list the locks that are held or waited for", "lockfast ls 'report:*'"),
    "show": ("lockfast.cli.show", "show one lock and its queue", "lockfast show backup"),
    "top": ("lockfast.cli.top", "watch holders and queues live", "lockfast top"),
    "force-release": ("lockfast.cli.force_release", "end a holder's lease", "lockfast force-release backup"),
    "doctor": ("lockfast.cli.doctor", "check whether a store is safe for locks", "lockfast doctor"),
    "bench": ("lockfast.cli.bench", "measure a store in a few seconds", "lockfast bench"),
    "completion": ("lockfast.cli.completion", "print a completion script", 'eval "$(lockfast completion bash)"'),
    "demo": ("lockfast.cli.demo", "show what a lock does, in about ten seconds", "lockfast demo"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments, and return its exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: a daemon's child, `>&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends
    own_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _run(argv)
        sys.stdout.flush()  # inside the try: a broken pipe is an exit code, not a traceback
        if own_process and argv[:1] == [RUN] and "lockfast.client.locks" not in sys.modules:
            os._exit(code)  # skips the interpreter's shutdown, which takes milliseconds
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the terminal's ^C
        return report("interrupted.", INTERRUPTED)
    except BrokenPipeError:
        # As after `lockfast ... | head`: the interpreter's last flush of the buffered output would fail.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return BROKEN_PIPE
    except Exception as error:
        return _failed(error)
    return code


def report(message: str, code: int) -> int:
    """Print an error message on stderr and return `code`."""
    try:
        sys.stderr.write(f"lockfast: {message}\n")
        sys.stderr.flush()
    except OSError:
        pass  # the exit code remains
    return code


def _run(argv: list[str]) -> int:
    if argv[:1] == [RUN]:
        return int(load(RUN).run(argv[1:]))
    parser = _parser(argv)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    return int(load(args.command).run(args))


def load(command: str) -> Any:
    """Load the module of a command by name, without `importlib`, which would delay `run`."""
    return __import__(COMMANDS[command][0], fromlist=["run"])


def _failed(error: Exception) -> int:
    from lockfast.errors import LockError

    if isinstance(error, LockError | OSError):
        return report(str(error), FAILED)
    if os.environ.get("LOCKFAST_TRACEBACK"):
        raise error
    what = f"{type(error).__name__}: {str(error)[:200]!a}"
    return report(f"bug in lockfast: {what}. Set LOCKFAST_TRACEBACK=1 for a traceback, and please report it.", BUG)


def _parser(argv: list[str]) -> ArgumentParser:
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            self.exit(USAGE, f"{self.prog}: {message}. Try {self.prog} --help.\n")

    formatter = argparse.RawDescriptionHelpFormatter
    summaries = "\n".join(f"  {name:<15}{summary}" for name, (_, summary, _) in COMMANDS.items())
    examples = "\n".join(f"  $ {example}" for _, _, example in COMMANDS.values())
    parser = Parser(
        prog="lockfast",
        usage="lockfast [-h] [--version] COMMAND ...",
        description=f"Run commands under a distributed lock, and see and repair locks.\n\ncommands:\n{summaries}",
        epilog=f"examples:\n{examples}",
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"lockfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="lockfast", help=argparse.SUPPRESS)
    requested = next((arg for arg in argv if not arg.startswith("-")), None)
    for name in COMMANDS:
        below = commands.add_parser(name, formatter_class=formatter)
        if name == requested and name != RUN:
            load(name).add_arguments(below)
    return parser
