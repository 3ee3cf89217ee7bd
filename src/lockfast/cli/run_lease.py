"""The lease of a command, acquired and renewed by the library, and the status line during the wait.

`lockfast run` loads this module only when it needs the library: on a server, for a lock that is taken or shared, for
several locks, and for a command that runs longer than a second. A run that does not wait loads no `view`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import lockfast
from lockfast.cli.run_options import Busy, Options
from lockfast.client.connect import resume
from lockfast.errors import LeaseLost
from lockfast.values import LockInfo, clean

STATUS_AFTER, STATUS_EVERY = 0.3, 0.5


class CommandLease:
    """The leases under which a command runs: one for each name. `release` gets the command's exit code."""

    renew_at = float("inf")

    def __init__(self, options: Options, leases: Sequence[lockfast.Lease], release: Callable[[int], object]) -> None:
        self._options = options
        self._leases = leases
        self.release = release
        self._min_remaining = min(options.grace, options.ttl / 3)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell the command what it holds."""
        first = self._leases[0]
        found = {"LOCKFAST_NAME": first.name, "LOCKFAST_FENCE": str(first.fence), "LOCKFAST_HOLDER": first.holder}
        if len(self._leases) > 1:
            found["LOCKFAST_FENCES"] = " ".join(str(lease.fence) for lease in self._leases)
        if self._options.limit is not None and isinstance(first, lockfast.Permit):
            found["LOCKFAST_SLOT"] = str(first.slot)
            found["LOCKFAST_SLOTS"] = " ".join(map(str, first.slots))
        return found

    @property
    def why_lost(self) -> str:
        """Why the command must end; empty while it may run."""
        for lease in self._leases:
            try:
                lease.ensure_held()
            except LeaseLost as error:
                return str(error)
            if lease.state.value == "at risk" and lease.remaining < self._min_remaining:
                return f"The lease on {lease.name!a} cannot be renewed and would soon expire."
        return ""

    def renewed(self, wake: Callable[[], None]) -> CommandLease:
        return self


def resume_lease(options: Options, grant: Any, wake: Callable[[], None]) -> CommandLease:
    """Take over a grant that was made without the library, and renew it from now on."""
    _disable_warnings()
    lease = resume(grant, options.url, options.shown_label, _lock_options(options, wake))
    return _one(options, lease)


def acquire(options: Options, wake: Callable[[], None]) -> CommandLease:
    """Acquire the locks; raise `Busy` if they stay held. `wake` is called when a lease is at risk or lost."""
    _disable_warnings()
    locks = lockfast.connect(options.url, label=options.shown_label)
    lock_options = _lock_options(options, wake)
    if options.once:
        return _acquire_once(options, locks, lock_options)
    members = _members(options, locks, lock_options)
    acquired = threading.Event()
    status = threading.Thread(target=_show_status, args=(members, acquired), daemon=True)
    if sys.stderr.isatty() and not options.quiet and not options.no_wait:
        status.start()
    try:
        lease = _claim(options, locks, members)
    finally:
        acquired.set()
        if status.is_alive():
            status.join(1.0)
    if lease is not None:
        return lease
    if options.quiet or (options.no_wait and not sys.stderr.isatty()):
        raise Busy  # with -n the exit code says enough, unless a person is reading
    waited = "" if options.no_wait else f" after {options.wait:g} s"
    raise Busy(f"could not acquire {' and '.join(map(ascii, options.names))}{waited}: {_blocked_by(members)}.")


def _members(options: Options, locks: lockfast.Locks, lock_options: dict[str, Any]) -> list[lockfast.Lock]:
    """The locks that the command needs, in the order of the command line."""
    name = options.names[0]
    if options.shared:
        return [locks.rwlock(name, **lock_options).reader]
    if options.limit is not None:
        return [locks.semaphore(name, options.limit, permits=options.permits or 1, **lock_options)]
    return [locks.lock(name, **lock_options) for name in options.names]


def _claim(options: Options, locks: lockfast.Locks, members: Sequence[lockfast.Lock]) -> CommandLease | None:
    timeout = 0 if options.no_wait else options.wait
    if len(members) == 1:
        lease = members[0].acquire(timeout=timeout)
        return None if lease is None else _one(options, lease)
    leases = locks.all_of(*members).acquire(timeout=timeout)
    if leases is None:
        return None
    return CommandLease(options, [leases[name] for name in options.names], lambda code: leases.release())


def _one(options: Options, lease: lockfast.Lease) -> CommandLease:
    return CommandLease(options, [lease], lambda code: lease.release())


def _acquire_once(options: Options, locks: lockfast.Locks, lock_options: dict[str, Any]) -> CommandLease:
    lock_options |= {"at_least": options.at_least or 0.0, "at_most": lock_options.pop("max_hold")}
    once = locks.once(options.names[0], every=options.once_per, busy="skip", **lock_options)
    lease = once.__enter__()
    if not lease:
        raise Busy(f"{lease}." if sys.stderr.isatty() and not options.quiet else "")
    # The exit code decides how long the lock stays held.
    return CommandLease(options, [lease], lambda code: once.__exit__(SystemExit, SystemExit(code), None))


def _disable_warnings() -> None:
    """Turn off the library's warnings: the command reports a loss itself."""
    logging.getLogger("lockfast").setLevel(logging.ERROR)


def _lock_options(options: Options, wake: Callable[[], None]) -> dict[str, Any]:
    changes = dict.fromkeys(("on_lost", "on_risk"), lambda _: wake())
    return {"ttl": options.ttl, "max_hold": options.max_hold, **changes}


def _blocked_by(members: Sequence[lockfast.Lock]) -> str:
    """Who holds the locks, for the report of a failure."""
    infos = [lock.inspect() for lock in members]
    taken = [info for info in infos if info.locked]
    if not taken:
        return "it has just become free" if len(infos) == 1 else "they have just become free"
    return (f"{taken[0].name!a} is " if len(infos) > 1 else "") + _holder(taken[0])


def _holder(info: LockInfo) -> str:
    from lockfast.cli.view import holders_text

    return f"held by {holders_text(info)}" if info.locked else "it has just become free"


def _show_status(members: Sequence[lockfast.Lock], acquired: threading.Event) -> None:
    """Until the locks are acquired, write the holder and the queue position to the terminal."""
    started = time.monotonic()
    line = ""
    try:
        while not acquired.wait(STATUS_EVERY if line else STATUS_AFTER):
            try:
                line = _status(members, time.monotonic() - started)
            except Exception:
                line = f"waiting for {members[0].name!a}; the store does not answer"
            if not acquired.is_set():
                _overwrite(line)
        if line:
            _overwrite("")
    except OSError:
        pass  # the terminal is closed


def _status(members: Sequence[lockfast.Lock], waited: float) -> str:
    """Describe the lock in whose queue this process is."""
    from lockfast.cli.view import duration

    shown, position = members[0].inspect(), ""
    for info in (shown, *(lock.inspect() for lock in members[1:])):
        ours = [at for at, waiter in enumerate(info.waiters, 1) if waiter.owner and waiter.owner.pid == os.getpid()]
        if ours:
            shown, position = info, f", position {ours[0]} of {info.waiting}"
            break
    return f"lockfast: waiting for {clean(shown.name)} ({duration(waited)}){position}: {_holder(shown)}"


def _overwrite(line: str) -> None:
    columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    sys.stderr.write(f"\r{line[: columns - 1]}\x1b[K")
    sys.stderr.flush()
