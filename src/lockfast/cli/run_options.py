"""Arguments of `lockfast run`, parsed without argparse, which takes longer to load than a short command to run.

Options come before the command. The command starts after `--`, or at the first word after the lock name that is not an
option; its words are not parsed. A usage error is one sentence.
"""

from __future__ import annotations

import os

BUSY, LOST, STORE, USAGE = 75, 76, 69, 2
"""Exit codes: the lock stayed held, the lock was lost, the store failed, wrong usage."""

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

FLAGS = {"-n": "no_wait", "--no-wait": "no_wait", "-q": "quiet", "--quiet": "quiet", "-h": "help", "--help": "help"}
FLAGS |= {"-s": "shared", "--shared": "shared"}
TIMES = ("wait", "ttl", "max_hold", "once_per", "at_least", "grace")
COUNTS = ("limit", "permits")
VALUES = {f"--{field.replace('_', '-')}": field for field in (*TIMES, *COUNTS, "also", "busy_code", "label", "url")}
VALUES |= {"-w": "wait", "-E": "busy_code"}

HELP = f"""\
usage: lockfast run [options] NAME [--] COMMAND [ARG ...]

Run a command while holding a lock. Input, output and exit code are its own.

sharing the lock (by default one command at a time holds it):
  -s, --shared          share it with other readers; excludes commands without
                        this option, as a read/write lock does
  --limit N             share it among N permits, as a semaphore does
  --permits K           take K of the N permits (default 1)
  --also NAME           hold this lock too, all or none; may be repeated

waiting for the lock (by default without limit, first come, first served):
  -n, --no-wait         if the lock is held, exit with the busy code at once
  -w, --wait TIME       wait at most this long
  -E, --busy-code CODE  exit code if the lock stays held (default {BUSY})

holding the lock:
  --ttl TIME            after a crash, the lock expires within this time
                        (default 30s); renewed while the command runs
  --max-hold TIME       terminate the command after this time
  --at-least TIME       hold the lock at least this long from the start,
                        even if the command ends sooner
  --once-per TIME       after a success, hold the lock for nine tenths of
                        this time
  --grace TIME          time from SIGTERM to SIGKILL after a lost lock
                        (default 10s)

other:
  --label TEXT          the owner in `lockfast ls` (default: the command)
  --url URL             the store: redis://, rediss://, valkey://, unix://,
                        sqlite:///path (default: $LOCKFAST_URL, else the
                        embedded store)
  -q, --quiet           do not print who holds the lock
  -h, --help            this text

TIME is seconds, or a number with s, m, h or d: 90, 1.5m, 2h. The command gets
LOCKFAST_NAME, LOCKFAST_FENCE and LOCKFAST_HOLDER in its environment; with
--limit also LOCKFAST_SLOT and LOCKFAST_SLOTS, with --also LOCKFAST_FENCES.

exit codes: the command's own; 128+n if signal n ended it; {BUSY} the lock stayed
  held (-E); {LOST} the lock was lost and the command terminated; {STORE} the store
  cannot be used; {USAGE} wrong usage; 126 the command cannot be run; 127 it was not
  found.

examples:
  $ lockfast run backup -- pg_dump -f /backup/db.sql shop
  $ lockfast run -w 30 deploy --url redis://cache:6379 -- make deploy
  $ lockfast run --shared config -- ./read-config.sh
  $ lockfast run --limit 4 gpu -- sh -c './train --device $LOCKFAST_SLOT'
  $ lockfast run account:7 --also account:9 -- ./transfer.sh 7 9
  $ lockfast run -E 0 --at-least 10m report -- ./report.sh
    (in the same crontab on three machines)
"""


class UsageError(Exception):
    """One sentence that says which argument is wrong."""


class Busy(Exception):
    """The lock is held by another client; the message is for people and may be empty."""


class Options:
    """The parsed arguments. `names` are the locks in the order of the command line, `NAME` first."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.also: list[str] = []
        self.command: list[str] = []
        self.no_wait = self.quiet = self.help = self.shared = False
        self.limit: int | None = None
        self.permits: int | None = None
        self.wait: float | None = None
        self.ttl = 30.0
        self.max_hold: float | None = None
        self.once_per: float | None = None
        self.at_least: float | None = None
        self.grace = 10.0
        self.busy_code = BUSY
        self.label: str | None = None
        self.url: str | None = None

    @property
    def once(self) -> bool:
        """Whether the command is a job that one of many machines runs."""
        return self.once_per is not None or self.at_least is not None

    @property
    def is_plain(self) -> bool:
        """Whether the command needs one lock, exclusively."""
        return not self.shared and self.limit is None and len(self.names) == 1

    @property
    def shown_label(self) -> str:
        """The label, or the command's name."""
        if self.label is not None:
            return self.label
        name = os.path.basename(self.command[0])
        return "".join(char for char in name if char.isprintable())[:64]


def parse(words: list[str]) -> Options:
    """Parse `lockfast run *words`, or raise `UsageError`."""
    options = Options()
    left = list(words)
    while left and not options.command:
        word = left.pop(0)
        if word == "--" or (options.names and not word.startswith("-")):
            options.command = left if word == "--" else [word, *left]
            break
        if not word.startswith("-") or word == "-":
            options.names = [word]
        else:
            _read(options, word, left)
    if options.names:
        options.names += options.also
    if not options.help:
        _check(options)
    return options


def _read(options: Options, word: str, left: list[str]) -> None:
    """Parse one option; its value is in the same word or the next."""
    if word in FLAGS:
        setattr(options, FLAGS[word], True)
        return
    flag, given, value = word.partition("=")
    if not word.startswith("--"):
        flag, value = word[:2], word[2:]
        given = value
    if flag not in VALUES:
        raise UsageError(f"unknown option {flag}")
    if not given:
        if not left:
            raise UsageError(f"{flag} needs a value")
        value = left.pop(0)
    field = VALUES[flag]
    if field in TIMES:
        setattr(options, field, seconds_in(value, flag))
    elif field in COUNTS:
        if not (value.isascii() and value.isdecimal() and int(value) > 0):
            raise UsageError(f"{flag} needs a whole number from 1, not {value[:40]!a}")
        setattr(options, field, int(value))
    elif field == "also":
        options.also.append(value)
    elif field == "busy_code":
        if not (value.isascii() and value.isdecimal() and int(value) <= 255):
            raise UsageError(f"-E needs an exit code from 0 to 255, not {value[:40]!a}")
        options.busy_code = int(value)
    else:
        setattr(options, field, value)


def _check(options: Options) -> None:
    if not options.names:
        raise UsageError("the lock name is missing")
    if not options.command:
        raise UsageError("the command is missing")
    if not options.command[0]:
        raise UsageError("the command is empty")
    if (options.url or os.environ.get("LOCKFAST_URL") or "").lower().startswith("memory:"):
        raise UsageError("memory:// exists in one process only, so it cannot exclude other commands")
    if options.no_wait and options.wait is not None:
        raise UsageError("-n and -w exclude each other")
    if options.once and options.wait is not None:
        raise UsageError("--once-per and --at-least never wait, so they cannot be combined with -w")
    _check_sharing(options)


def _check_sharing(options: Options) -> None:
    if options.permits is not None and options.limit is None:
        raise UsageError("--permits needs --limit, the number of permits that all commands share")
    if options.permits is not None and options.limit is not None and options.permits > options.limit:
        raise UsageError(f"--permits {options.permits} can never be granted with --limit {options.limit}")
    if options.shared and options.limit is not None:
        raise UsageError("--shared and --limit exclude each other: readers have no limit")
    if len(set(options.names)) < len(options.names):
        raise UsageError("--also names the same lock twice")
    if options.also and (options.shared or options.limit is not None):
        raise UsageError("--also takes exclusive locks, so it cannot be combined with --shared or --limit")
    if options.once and not options.is_plain:
        raise UsageError("--once-per and --at-least need one exclusive lock, without --shared, --limit and --also")


def seconds_in(text: str, flag: str) -> float:
    """Parse a time.

    >>> seconds_in("90", "-w"), seconds_in("1.5m", "-w"), seconds_in("2h", "-w")
    (90.0, 90.0, 7200.0)
    """
    unit = UNITS.get(text[-1:], 0.0)
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:  # false for NaN too
        raise UsageError(f"{flag} needs a time such as 90, 1.5m or 2h, not {text[:40]!a}")
    return value
