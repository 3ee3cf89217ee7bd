"""Threads that take turns, so that every schedule can be played, one after the other.

Exactly one of them runs. At each line of the watched files it may have to hand over to another: that is a *switch*.
Where a thread waits (for a lock, a wake-up, bytes) or ends, somebody else runs, and time jumps when nobody can. A
schedule is the list of choices at all these points; `every_schedule` plays all those with at most so many switches,
depth first. (Most errors of concurrent code show with two switches or fewer, if they are at the right place.) The
threads are greenlets: a switch costs a microsecond, and the code that they run cannot tell.
"""

import gc
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

from greenlet import getcurrent, greenlet

from lockfast.runtime.runner import run
from lockfast.runtime.threads import ThreadRuntime


class Deadlock(Exception):
    """All threads wait, and no time can end it."""


class Choice(NamedTuple):
    """At one point: how many could run, which was taken, and whether taking another costs a switch."""

    options: int
    taken: int
    is_switch: bool


class Player:
    """One thread of a play."""

    body: greenlet

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits_for: Callable[[], bool] | None = None
        self.until: float | None = None
        self.ended = False
        self.error: BaseException | None = None


class Turns:
    """One play of one schedule."""

    def __init__(self, watched: Sequence[str], schedule: Sequence[int], switches: int) -> None:
        self.now = 100.0
        self.choices: list[Choice] = []
        self._watched = frozenset(watched)
        self._schedule = schedule
        self._switches = switches
        self._players: list[Player] = []
        self._home = getcurrent()
        self._me: Player | None = None
        self._stuck = False

    # Threads.

    def add(self, work: Callable[[], object], name: str) -> None:
        player = Player(name)
        player.body = greenlet(lambda: self._body(player, work), self._home)
        self._players.append(player)

    def play(self) -> list[BaseException]:
        """Run all to their end; the errors they ended with."""
        # What an earlier play left must not be collected in the midst of this one: its end would be played along, and
        # perhaps where a mutex is held that is none of ours.
        collects = gc.isenabled()
        gc.disable()
        sys.settrace(self._trace)
        try:
            while able := self._able():
                self._run(self._choose(able, is_switch=False))
        finally:
            sys.settrace(None)
            if collects:
                gc.enable()
        return [player.error for player in self._players if player.error is not None]

    def _body(self, player: Player, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            player.error = error
        player.ended = True  # and its parent, `play`, goes on

    def _run(self, player: Player) -> None:
        self._me = player
        player.body.switch()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self._watched:
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.point()
        return self._line

    # Choices.

    def _able(self) -> list[Player]:
        """Who can run now; when nobody can, time goes on."""
        while True:
            found = [one for one in self._players if not one.ended and self._is_able(one)]
            if found or all(one.ended for one in self._players):
                return found
            ends = [one.until for one in self._players if not one.ended and one.until is not None]
            if ends:
                self.now = max(self.now, min(ends))
            else:
                self._stuck = True  # everybody is woken to find out

    def _is_able(self, player: Player) -> bool:
        if self._stuck or player.waits_for is None or player.waits_for():
            return True
        return player.until is not None and player.until <= self.now

    def _choose(self, options: list[Player], *, is_switch: bool) -> Player:
        if len(options) == 1:
            return options[0]
        at = len(self.choices)
        taken = self._schedule[at] if at < len(self._schedule) else 0
        self.choices.append(Choice(len(options), taken, is_switch))
        return options[taken]

    def point(self) -> None:
        """A line was reached: go on, or switch."""
        me = self._me
        if me is None or not self._switches:
            return  # before the play has begun, or no choice is left
        chosen = self._choose([me, *(one for one in self._able() if one is not me)], is_switch=True)
        if chosen is not me:
            self._switches -= 1
            self._run(chosen)
            self._me = me

    def wait(self, waits_for: Callable[[], bool], until: float | None = None) -> bool:
        """Until the condition holds, or the time has come; whether it holds."""
        me = self._me
        if me is None:
            raise RuntimeError("nobody can wait before the play has begun")
        me.waits_for, me.until = waits_for, until
        self._home.switch()
        me.waits_for = me.until = None
        if self._stuck:
            raise Deadlock(me.name)
        return waits_for()


class TurnLock:
    """`threading.Lock`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._taken = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._taken:
            until = None if timeout < 0 else self._turns.now + timeout
            if not blocking or not self._turns.wait(lambda: not self._taken, until):
                return False
        self._taken = True
        return True

    def release(self) -> None:
        self._taken = False

    def locked(self) -> bool:
        return self._taken

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class TurnWaker:
    """`ports.Waker`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._called = False

    def wake(self) -> None:
        self._called = True

    async def wait(self, until: float | None) -> bool:
        called = self._called or self._turns.wait(lambda: self._called, until)
        self._called = False
        return called


class TurnRuntime(ThreadRuntime):
    """`ports.Runtime` whose threads take turns."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self.now = lambda: turns.now
        self.random = lambda: 0.5
        self.mutex: Callable[[], AbstractContextManager[Any]] = lambda: TurnLock(turns)
        self.waker: Any = lambda: TurnWaker(turns)

    async def sleep(self, seconds: float) -> None:
        self._turns.wait(lambda: False, self._turns.now + max(0.0, seconds))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        self._turns.add(lambda: run(work()), name)
        return True


def every_schedule(play: Callable[[Sequence[int]], Sequence[Choice]], switches: int) -> Iterator[int]:
    """Play each schedule with at most so many switches; gives the number of each as it has been played."""
    schedule: list[int] | None = []
    played = 0
    while schedule is not None:
        choices = play(schedule)
        played += 1
        yield played
        schedule = _following(choices, switches)


def _following(choices: Sequence[Choice], switches: int) -> list[int] | None:
    """The next schedule, depth first."""
    spent = [0]
    for choice in choices:
        spent.append(spent[-1] + (choice.is_switch and choice.taken > 0))
    for at in range(len(choices) - 1, -1, -1):
        choice = choices[at]
        if choice.taken + 1 < choice.options and spent[at] + choice.is_switch <= switches:
            return [one.taken for one in choices[:at]] + [choice.taken + 1]
    return None
