"""`lockfast run`, from its words to its exit code."""

from __future__ import annotations

import sys

from lockfast.cli.run.hold import take_at_once
from lockfast.cli.run.launch import Launch, NotStarted, end_group
from lockfast.cli.run.options import HELP, LOST, STORE, WRONG, CalledWrongly, Options, parse
from lockfast.cli.run.terminal import Foreground
from lockfast.cli.run.watch import Bell, Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lockfast.cli.run.hold import LeaseHold, QuickHold


def run(words: list[str]) -> int:
    """The exit code of `lockfast run *words`."""
    try:
        options = parse(words)
    except CalledWrongly as error:
        return _say(f"{error}. Try lockfast run --help.", WRONG)
    if options.help:
        print(HELP, end="")
        return 0
    launch = Launch(options.command, options.grace)
    try:
        bell = Bell()
        bell.listen()
        hold = take_at_once(options)
        if hold is not None:
            return _under(options, launch, hold, bell)
        return _with_library(options, launch, bell)
    finally:
        launch.end()


def _with_library(options: Options, launch: Launch, bell: Bell) -> int:
    """The same where the lock has to be waited for, or lies on a server."""
    from lockfast.cli.run.waiting import Busy, Signalled, take
    from lockfast.errors import ConfigurationError, LockError

    try:
        return _under(options, launch, take(options, bell), bell)
    except Busy as busy:
        return _say(str(busy), options.busy_code)
    except Signalled as ended:
        return 128 + ended.number
    except ConfigurationError as error:
        return _say(str(error), WRONG)
    except LockError as error:
        return _say(str(error), STORE)


def _under(options: Options, launch: Launch, hold: QuickHold | LeaseHold, bell: Bell) -> int:
    """Run the command under a lock that is held, and give it back."""
    bell.listen()
    front = Foreground()
    watch = Watch(options, launch, hold, bell, front)
    code = LOST
    try:
        environment = {"LOCKFAST_NAME": options.name, "LOCKFAST_FENCE": str(hold.fence), "LOCKFAST_HOLDER": hold.holder}
        front.give(launch.pid)
        launch.begin(environment)
        code = watch.run()
    except NotStarted as error:
        code = error.code
        return _say(f"{error}.", code)
    except BaseException:
        end_group(launch.pid, options.grace)  # nobody looks after it any more
        raise
    finally:
        front.take_back(launch.pid)
        _give_back(watch, code)
    if code == LOST and watch.why_lost:
        _say(f"the lock {options.name!a} was lost, so the command was ended: {watch.why_lost}.", code)
    return code


def _give_back(watch: Watch, code: int) -> None:
    """The command has ended under the lock, so that giving it back fails is no failure of the command."""
    try:
        watch.hold.give_back(code)
    except Exception as error:
        from lockfast.errors import LockError

        if not isinstance(error, LockError):
            raise
        if not watch.why_lost:
            _say(f"the lock could not be given back, and frees itself when its ttl is over: {error}", 0)


def _say(sentence: str, code: int) -> int:
    if sentence:
        try:
            sys.stderr.write(f"lockfast: {sentence}\n")
            sys.stderr.flush()
        except OSError:
            pass  # nobody can be told, and the code says it all the same
    return code
