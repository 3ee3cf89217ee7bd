"""What `lockfast run` can be told, read without argparse: that takes longer to load than the common case to run.

Rules kept here: options stand before the command; what follows the name and `--`, or the first word after the name that
is no option, is the command's own and is not looked at. A wrong call is one sentence.
"""

from __future__ import annotations

import os

BUSY, LOST, STORE, WRONG = 75, 76, 69, 2
"""Exit codes: the lock was taken, the lock was lost, the store failed, called wrongly."""

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

FLAGS = {"-n": "no_wait", "--no-wait": "no_wait", "-q": "quiet", "--quiet": "quiet", "-h": "help", "--help": "help"}
VALUES = {
    "-w": "wait",
    "--wait": "wait",
    "-E": "busy_code",
    "--busy-code": "busy_code",
    "--ttl": "ttl",
    "--max-hold": "max_hold",
    "--once-per": "once_per",
    "--at-least": "at_least",
    "--grace": "grace",
    "--label": "label",
    "--url": "url",
}
TIMES = ("wait", "ttl", "max_hold", "once_per", "at_least", "grace")

HELP = f"""\
usage: lockfast run [options] NAME [--] COMMAND [ARG ...]

Run a command while holding a lock. Its input, output and exit code are its own.

waiting for the lock (without an option: as long as it takes, first come, first served):
  -n, --no-wait         do not wait: if the lock is taken, exit with the busy code
  -w, --wait TIME       wait this long at most
  -E, --busy-code CODE  exit code when the lock is taken (default {BUSY})

holding it:
  --ttl TIME            how long a crash of this machine blocks the others (default 30s); renewed
                        while the command runs
  --max-hold TIME       end the command when it has held the lock for so long
  --at-least TIME       nobody else starts before so much time has passed since the start, however
                        soon the command ends
  --once-per TIME       after a success nobody starts again for nine tenths of this time
  --grace TIME          when the lock is lost: how long after SIGTERM to send SIGKILL (default 10s)

and:
  --label TEXT          who you are, for `lockfast ls` (default: the command)
  --url URL             the store: redis://, rediss://, valkey://, unix://, sqlite:///path
                        (default: $LOCKFAST_URL, else the embedded store)
  -q, --quiet           do not say whom you wait for
  -h, --help            this text

TIME is seconds, or a number with s, m, h or d: 90, 1.5m, 2h.
The command finds LOCKFAST_NAME, LOCKFAST_FENCE and LOCKFAST_HOLDER in its environment.

exit codes: the command's own; 128+n if signal n ended it; {BUSY} the lock was taken (-E);
  {LOST} the lock was lost and the command ended; {STORE} the store cannot be used; {WRONG} called wrongly;
  126 the command cannot be run; 127 it was not found.

examples:
  $ lockfast run backup -- pg_dump -f /backup/db.sql shop
  $ lockfast run -E 0 --at-least 10m report -- ./report.sh    (the same crontab on three machines)
  $ lockfast run -w 30 deploy --url redis://cache:6379 -- make deploy
"""


class CalledWrongly(Exception):
    """Says in one sentence what is wrong with the call."""


class Options:
    """The call, understood."""

    def __init__(self) -> None:
        self.name = ""
        self.command: list[str] = []
        self.no_wait = self.quiet = self.help = False
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
        """Whether this is a job that one of many runs."""
        return self.once_per is not None or self.at_least is not None

    @property
    def shown_label(self) -> str:
        """The label, by default the command's name."""
        if self.label is not None:
            return self.label
        name = os.path.basename(self.command[0])
        return "".join(char for char in name if char.isprintable())[:64]


def parse(words: list[str]) -> Options:
    """The call `lockfast run *words`, or `CalledWrongly`."""
    options = Options()
    left = list(words)
    while left and not options.command:
        word = left.pop(0)
        if word == "--" or (options.name and not word.startswith("-")):
            options.command = left if word == "--" else [word, *left]
            break
        if not word.startswith("-") or word == "-":
            options.name = word
        else:
            _read(options, word, left)
    if not options.help:
        _check(options)
    return options


def _read(options: Options, word: str, left: list[str]) -> None:
    """Take in one option, and its value from the same word or the next."""
    if word in FLAGS:
        setattr(options, FLAGS[word], True)
        return
    flag, given, value = word.partition("=")
    if not word.startswith("--"):
        flag, value = word[:2], word[2:]
        given = value
    if flag not in VALUES:
        raise CalledWrongly(f"there is no option {flag}")
    if not given:
        if not left:
            raise CalledWrongly(f"{flag} needs a value")
        value = left.pop(0)
    field = VALUES[flag]
    if field in TIMES:
        setattr(options, field, seconds_in(value, flag))
    elif field == "busy_code":
        options.busy_code = _code(value)
    else:
        setattr(options, field, value)


def _check(options: Options) -> None:
    if not options.name:
        raise CalledWrongly("the name of the lock is missing")
    if not options.command:
        raise CalledWrongly("the command to run is missing")
    if not options.command[0]:
        raise CalledWrongly("the command to run is empty")
    if (options.url or os.environ.get("LOCKFAST_URL") or "").lower().startswith("memory:"):
        raise CalledWrongly("memory:// is known only inside one process, so it keeps no other command out")
    if options.no_wait and options.wait is not None:
        raise CalledWrongly("-n and -w contradict each other")
    if options.once and options.wait is not None:
        raise CalledWrongly("--once-per and --at-least do not wait, so -w makes no sense with them")


def seconds_in(text: str, flag: str) -> float:
    """The time that `text` says.

    >>> seconds_in("90", "-w"), seconds_in("1.5m", "-w"), seconds_in("2h", "-w")
    (90.0, 90.0, 7200.0)
    """
    unit = UNITS.get(text[-1:], 0.0)
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:  # false for NaN too
        raise CalledWrongly(f"{flag} needs a time such as 90, 1.5m or 2h, not {text[:40]!a}")
    return value


def _code(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) <= 255:
        return int(text)
    raise CalledWrongly(f"-E needs an exit code from 0 to 255, not {text[:40]!a}")
