"""The lease of a running command: acquired at once without the library if possible, else with it.

Rules:
- The library takes over an unrenewed lease before its first renewal is due, with the same holder id and fence.
- A lease at risk counts as lost early enough to end the command before another client can hold the lock.
- A signal ends the wait and leaves no ticket in the queue.
- While it waits, the command writes only to a terminal: one status line, which it erases at the end.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any, NoReturn

    import lockfast
    from lockfast.cli.run.options import Options
    from lockfast.cli.run.supervisor import WakePipe
    from lockfast.client.lease import Lease
    from lockfast.values import LockInfo
else:
    import _signal as signal  # see process.py

LIBRARY_AFTER = 1.0
"""Seconds that a command may run before the library is loaded to renew its lease."""
STATUS_AFTER, STATUS_EVERY = 0.3, 0.5


class Signalled(BaseException):
    """Signal `number` ended the wait."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Busy(Exception):
    """The lock is held by another client; the message is for people and may be empty."""


class UnrenewedLease:
    """A grant of the embedded store that no keepalive renews yet."""

    why_lost = ""

    def __init__(self, options: Options, grant: Any) -> None:
        self._options = options
        self._grant = grant
        self.fence = grant.fence
        self.holder = grant.holder
        self.renew_at = time.monotonic() + min(LIBRARY_AFTER, grant.ttl / 6)

    def renewed(self, wake: Callable[[], None]) -> CommandLease:
        """Hand the grant over to the library, which renews it."""
        from lockfast.client.connect import resume

        options = self._options
        _disable_warnings()
        lease = resume(self._grant, options.url, options.shown_label, _lock_options(options, wake))
        return CommandLease(options, lease)

    def release(self, code: int) -> None:
        if not self._grant.release():
            self.renewed(lambda: None).release(code)


class CommandLease:
    """A lease that the library renews."""

    renew_at = float("inf")

    def __init__(self, options: Options, lease: Lease) -> None:
        self._lease = lease
        self._min_remaining = min(options.grace, options.ttl / 3)
        self.fence = lease.fence
        self.holder = lease.holder

    @property
    def why_lost(self) -> str:
        """Why the command must end; empty while it may run."""
        from lockfast.errors import LeaseLost

        try:
            self._lease.ensure_held()
        except LeaseLost as error:
            return str(error)
        if self._lease.state.value == "at risk" and self._lease.remaining < self._min_remaining:
            return f"The lease on {self._lease.name!a} cannot be renewed and would soon expire."
        return ""

    def renewed(self, wake: Callable[[], None]) -> CommandLease:
        return self

    def release(self, code: int) -> None:
        self._lease.release()


class OnceLease(CommandLease):
    """The lease of `--once-per` or `--at-least`: the exit code decides how long the job stays closed."""

    def __init__(self, options: Options, lease: Lease, once: Any) -> None:
        super().__init__(options, lease)
        self._once = once

    def release(self, code: int) -> None:
        end = SystemExit(code)
        self._once.__exit__(type(end), end, None)


def acquire_at_once(options: Options) -> UnrenewedLease | None:
    """Acquire a free lock of the embedded store with one statement; None if it needs the library."""
    if options.once or options.max_hold is not None:
        return None
    from lockfast.client.connect import take_at_once

    grant = take_at_once(options.url, options.name, options.ttl, options.shown_label)
    return None if grant is None else UnrenewedLease(options, grant)


def acquire(options: Options, wake: WakePipe) -> CommandLease:
    """Acquire with the library. Raise `Busy` if the lock stays held, `Signalled` if a signal comes first."""
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    for number in ending:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, _raise_signalled)
    for early in wake.wait(0.0):
        if early in ending:
            raise Signalled(early)
    import lockfast

    _disable_warnings()
    locks = lockfast.connect(options.url, label=options.shown_label)
    lock_options = _lock_options(options, wake.wake)
    if options.once:
        return _acquire_once(options, locks, lock_options)
    lock = locks.lock(options.name, **lock_options)
    with StatusLine(lock, options):
        lease = lock.acquire(timeout=0 if options.no_wait else options.wait)
    if lease is None:
        raise Busy(_busy_message(lock, options))
    return CommandLease(options, lease)


def _acquire_once(options: Options, locks: lockfast.Locks, lock_options: dict[str, Any]) -> CommandLease:
    at_most = lock_options.pop("max_hold")
    at_least = options.at_least or 0.0
    once = locks.once(
        options.name, every=options.once_per, at_least=at_least, at_most=at_most, busy="skip", **lock_options
    )
    lease = once.__enter__()
    if not lease:
        raise Busy(f"{lease}." if sys.stderr.isatty() and not options.quiet else "")
    return OnceLease(options, lease, once)


def _raise_signalled(number: int, frame: object) -> NoReturn:
    raise Signalled(number)


def _disable_warnings() -> None:
    """Turn off the library's warnings: the command reports a loss itself."""
    import logging

    logging.getLogger("lockfast").setLevel(logging.ERROR)


def _lock_options(options: Options, wake: Callable[[], None]) -> dict[str, Any]:
    return {
        "ttl": options.ttl,
        "max_hold": options.max_hold,
        "on_lost": lambda _: wake(),
        "on_risk": lambda _: wake(),
    }


def _busy_message(lock: lockfast.Lock, options: Options) -> str:
    """With -n the exit code says enough, unless a person is reading."""
    if options.quiet or (options.no_wait and not sys.stderr.isatty()):
        return ""
    waited = "" if options.no_wait else f" after {options.wait:g} s"
    return f"could not acquire {options.name!a}{waited}: {_holder(lock.inspect())}."


def _holder(info: LockInfo) -> str:
    from lockfast.cli.view import duration, owner_text

    if not info.locked:
        return "it has just become free"
    return f"held by {owner_text(info.owner)}" + ("" if info.held_for is None else f" for {duration(info.held_for)}")


class StatusLine:
    """While the command waits, writes the holder and the queue position to the terminal."""

    def __init__(self, lock: lockfast.Lock, options: Options) -> None:
        import threading

        self._lock = lock
        self._name = options.name
        self._over = threading.Event()
        self._started = time.monotonic()
        self._thread: threading.Thread | None = None
        if sys.stderr.isatty() and not options.quiet and not options.no_wait:
            self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        written = False
        pause = STATUS_AFTER
        while not self._over.wait(pause):
            pause = STATUS_EVERY
            try:
                line = self._line()
            except Exception:
                line = f"waiting for {self._name!a}; the store does not answer"
            if not self._over.is_set():
                self._write(line)
                written = True
        if written:
            self._write("")

    def _line(self) -> str:
        from lockfast.cli.view import duration
        from lockfast.values import clean

        info = self._lock.inspect()
        ours = [at for at, waiter in enumerate(info.waiters, 1) if waiter.owner and waiter.owner.pid == os.getpid()]
        position = f", position {ours[0]} of {info.waiting}" if ours else ""
        waited = duration(time.monotonic() - self._started)
        return f"lockfast: waiting for {clean(self._name)} ({waited}){position}: {_holder(info)}"

    def _write(self, line: str) -> None:
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(f"\r{line[: columns - 1]}\x1b[K")
            sys.stderr.flush()
        except OSError:
            self._over.set()
