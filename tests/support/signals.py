"""Default signal dispositions for every process that the tests start.

`nohup` ignores SIGHUP, a shell ignores SIGINT and SIGQUIT in its background jobs, and a supervisor may ignore or block
others. Children inherit that, and a program under test would then survive the signal that its test sends.
"""

import signal
from types import FrameType

PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that every Python process ignores; `subprocess` restores them in its children."""


def reset_for_children() -> None:
    """Start children with default dispositions and no blocked signal; call it in the main thread.

    An ignored signal gets a handler that does nothing. This process still ignores it, so `nohup` works; in a child
    `exec` replaces a handler, unlike SIG_IGN, by the default.
    """
    for number in signal.valid_signals() - PYTHONS_OWN:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
