"""`lockfast run`, from its arguments to its exit code."""

from __future__ import annotations

from lockfast.cli.main import report
from lockfast.cli.run.lease import Busy, Signalled, acquire, acquire_at_once
from lockfast.cli.run.options import HELP, LOST, STORE, USAGE, Options, UsageError, parse
from lockfast.cli.run.process import CommandProcess, Foreground, NotStarted, end_group
from lockfast.cli.run.supervisor import Supervisor, WakePipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lockfast.cli.run.lease import CommandLease, UnrenewedLease


def run(words: list[str]) -> int:
    """Run `lockfast run *words` and return its exit code."""
    try:
        options = parse(words)
    except UsageError as error:
        return report(f"{error}. Try lockfast run --help.", USAGE)
    if options.help:
        print(HELP, end="")
        return 0
    process = CommandProcess(options.command, options.grace)
    try:
        wake = WakePipe()
        wake.catch_signals()
        lease = acquire_at_once(options)
        if lease is not None:
            return _supervise(options, process, lease, wake)
        return _with_library(options, process, wake)
    finally:
        process.close()


def _with_library(options: Options, process: CommandProcess, wake: WakePipe) -> int:
    """Acquire with the library: on a server, or where the claim has to wait."""
    from lockfast.errors import ConfigurationError, LockError

    try:
        return _supervise(options, process, acquire(options, wake), wake)
    except Busy as busy:
        return report(str(busy), options.busy_code) if str(busy) else options.busy_code
    except Signalled as ended:
        return 128 + ended.number
    except ConfigurationError as error:
        return report(str(error), USAGE)
    except LockError as error:
        return report(str(error), STORE)


def _supervise(options: Options, process: CommandProcess, lease: UnrenewedLease | CommandLease, wake: WakePipe) -> int:
    """Run the command under the lease, then release it."""
    wake.catch_signals()
    terminal = Foreground()
    supervisor = Supervisor(options, process.pid, lease, wake, terminal)
    code = LOST
    try:
        terminal.give(process.pid)
        process.start(
            {"LOCKFAST_NAME": options.name, "LOCKFAST_FENCE": str(lease.fence), "LOCKFAST_HOLDER": lease.holder}
        )
        code = supervisor.run()
    except NotStarted as error:
        code = error.code
        return report(f"{error}.", code)
    except BaseException:
        end_group(process.pid, options.grace)  # nothing supervises it any more
        raise
    finally:
        terminal.take_back(process.pid)
        _release(supervisor, code)
    if code == LOST and supervisor.why_lost:
        report(f"the command was terminated. {supervisor.why_lost}", code)
    return code


def _release(supervisor: Supervisor, code: int) -> None:
    """Release the lock. A failure here does not change the exit code: the command ran under the lock."""
    try:
        supervisor.lease.release(code)
    except Exception as error:
        from lockfast.errors import LockError

        if not isinstance(error, LockError):
            raise
        if not supervisor.why_lost:
            report(f"the lock could not be released; it expires at the end of its ttl: {error}", code)
