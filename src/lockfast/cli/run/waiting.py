"""Take the lock with the library, and on a terminal say whom one waits for meanwhile.

Rules kept here: a signal ends the wait and leaves no place in the queue; nothing is written but to a terminal, on one
line that is gone when the wait is over.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from lockfast.cli.run.hold import LeaseHold, OnceHold, connected, lock_options
from lockfast.cli.words import ago, who

if TYPE_CHECKING:
    from lockfast.cli.run.options import Options
    from lockfast.cli.run.watch import Bell
    from lockfast.values import LockInfo

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SAY_AFTER = 0.3
SAY_EVERY = 0.5


class Signalled(BaseException):
    """A signal ended the wait; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Busy(Exception):
    """The lock stayed taken; the message is for people, and may be empty."""


def take(options: Options, bell: Bell) -> LeaseHold:
    """The lease; `Busy` when the lock stayed taken, `Signalled` when a signal came first."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup one is, and stays so
            signal.signal(number, _stop)
    for early in bell.wait(0.0):
        if early in ENDING:
            raise Signalled(early)
    locks = connected(options)
    chosen = lock_options(options) | {"on_lost": lambda _: bell.ring(), "on_risk": lambda _: bell.ring()}
    if options.once:
        return _take_once(options, locks, chosen)
    lock = locks.lock(options.name, **chosen)
    with Teller(lock, options):
        lease = lock.acquire(timeout=0 if options.no_wait else options.wait)
    if lease is None:
        raise Busy(_busy(lock, options))
    return LeaseHold(options, lease, lease.release)


def _take_once(options: Options, locks: Any, chosen: dict[str, Any]) -> LeaseHold:
    at_most = chosen.pop("max_hold")
    once = locks.once(
        options.name, every=options.once_per, at_least=options.at_least or 0.0, at_most=at_most, busy="skip", **chosen
    )
    lease = once.__enter__()
    if not lease:
        raise Busy(str(lease) + "." if sys.stderr.isatty() and not options.quiet else "")
    return OnceHold(options, lease, once)


def _stop(number: int, frame: object) -> NoReturn:
    raise Signalled(number)


def _busy(lock: Any, options: Options) -> str:
    """What to say: who asked not to wait knows what it means, unless a person is there."""
    if options.quiet or (options.no_wait and not sys.stderr.isatty()):
        return ""
    info = lock.inspect()
    waited = "" if options.no_wait else f" after {options.wait:g} s"
    return f"{options.name!a} is taken{waited}: {_held(info)}."


def _held(info: LockInfo) -> str:
    if not info.locked:
        return "it has just become free again"
    return f"held by {who(info.owner)}" + ("" if info.held_for is None else f" for {ago(info.held_for)}")


class Teller:
    """Says on a terminal whom we wait for and how many are in front."""

    def __init__(self, lock: Any, options: Options) -> None:
        self._lock = lock
        self._name = options.name
        self._on = sys.stderr.isatty() and not options.quiet and not options.no_wait
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = time.monotonic()

    def __enter__(self) -> None:
        if self._on:
            self._thread = threading.Thread(target=self._tell, daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _tell(self) -> None:
        written = False
        pause = SAY_AFTER
        while not self._over.wait(pause):
            pause = SAY_EVERY
            try:
                line = self._line()
            except Exception:
                line = f"waiting for {self._name!a}; the store does not answer"
            if line and not self._over.is_set():
                self._write("\r" + line[: _columns() - 1] + "\x1b[K")
                written = True
        if written:
            self._write("\r\x1b[K")

    def _line(self) -> str:
        from lockfast.values import clean

        info: LockInfo = self._lock.inspect()
        ours = [place for place, one in enumerate(info.waiters) if one.owner and one.owner.pid == os.getpid()]
        place = f", place {ours[0] + 1} of {info.waiting}" if ours else ""
        waited = ago(time.monotonic() - self._started)
        return f"lockfast: waiting for {clean(self._name)} ({waited}){place}: {_held(info)}"

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            self._over.set()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80
