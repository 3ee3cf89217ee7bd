"""`lockfast demo`: four processes increment one counter without a lock, with it, and while one of them is killed.

    WORKING ─did→ WORKING                                  without a lock
    WAITING ─holds→ HOLDING ─did→ WAITING                  with it
    HOLDING ─stalls→ HOLDING ─killed→ KILLED               the victim
    any ─done→ FINISHED

Rules:
- Findings state the measured values, also when they are not the expected ones.
- No process and no file is left behind, also after Ctrl-C, SIGTERM and SIGHUP.
- The exit code is 0 only if no update was lost under the lock.

A worker is this module, started with `python -m` and the counter's path. It exchanges messages with its parent, each
one line with a JSON array:

    parent → worker (stdin)     order, an Order        do so many rounds
                                end of file            exit
    worker → parent (stdout)    ready                  ready for an order
                                holds, the fence       acquired the lock
                                stalls                 stopped between read and write
                                did, a Round           finished a round
                                done                   finished the order
                                failed, the error      cannot continue

The store's URL comes in LOCKFAST_URL, which other users cannot read. When stdin ends, the worker exits, whatever it
does: it never outlives its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn, Self, cast

import lockfast
from lockfast.cli.arguments import STORE_TIMEOUT
from lockfast.cli.terminal import NBSP, Block, Line, Terminal
from lockfast.errors import ConfigurationError, LockError
from lockfast.values import clean

NAME = "demo:counter"
SIZE = 4  # workers; the texts say "four"
VICTIM = 1  # index of the worker that is killed in the third act
PAUSE = 0.004  # seconds between read and write
TTL = 1.5  # seconds, for the third act
LONG_TTL = 30.0  # seconds, for the second act, in which a slow machine must not lose a lease

FRAME = 0.05  # seconds between two drawings
LATE = 1.5  # seconds after the ttl within which a dead holder's lock must be granted again, on a loaded machine
UNFAIR = 0.1  # part of its rounds by which the last worker may be behind the first

WORKING, WAITING, HOLDING, FINISHED, KILLED = "working", "waiting", "holding", "done", "killed"
STATE_STYLES = {WORKING: "cyan", WAITING: "dim", HOLDING: "green", FINISHED: "", KILLED: "red"}
MAX_BAR, AROUND_BAR = 48, 34  # columns of a worker's bar, and of the rest of its line
TIMEOUT = 30.0  # seconds to wait for the lock; many times the expected wait
STALL = 60.0  # seconds; the parent kills the worker much earlier
EXIT_TIMEOUT = 1.0  # seconds that a worker has to exit by itself after the end of stdin; its parent waits twice as long
SILENCE = 40.0  # seconds without any message after which the demo gives up

READY, HOLDS, STALLS, DID, DONE, FAILED = "ready", "holds", "stalls", "did", "done", "failed"

CODE = """\
import lockfast
locks = lockfast.connect("sqlite:///locks.db")  # or redis://localhost
with locks.lock("counter", ttl=30) as lease:    # renewed inside the block
    add_one()                                   # lease.fence only grows"""


class Order(NamedTuple):
    """Do `rounds` rounds, under the lock unless `ttl` is None. In round `stall_at` (from 1), stop between read and
    write."""

    rounds: int
    ttl: float | None = None
    stall_at: int | None = None


class Round(NamedTuple):
    """One finished round. Times are of the monotonic clock, which all processes of a machine share."""

    held_at: float
    released_at: float
    fence: int = 0


class Pace(NamedTuple):
    """How long the demo takes: `rounds` per worker (`rounds_3` in the third act), `linger` seconds to watch the victim
    hold the lock, `reading` seconds to read each introduction."""

    rounds: int
    rounds_3: int
    linger: float
    reading: float


FULL = Pace(rounds=100, rounds_3=50, linger=0.5, reading=0.8)
QUICK = Pace(rounds=25, rounds_3=12, linger=0.1, reading=0.0)


class Act(NamedTuple):
    """One act: its introduction and an order for each worker."""

    title: str
    intro: str
    orders: list[Order]


def acts(pace: Pace) -> list[Act]:
    short = Order(pace.rounds_3, TTL)
    crash = [short._replace(stall_at=pace.rounds_3 // 3) if index == VICTIM else short for index in range(SIZE)]
    return [
        Act(
            "Without a lock",
            f"Four worker processes add 1 to the number in one file, {pace.rounds} times each: read it, wait "
            f"{PAUSE * 1000:g}{NBSP}ms, write it back. Nothing coordinates them.",
            [Order(pace.rounds)] * SIZE,
        ),
        Act(
            "With the lock",
            'The same work, but each round runs inside `with locks.lock("demo:counter")`. The workers wait in a queue, '
            "and each grant has a fence: a number that only grows.",
            [Order(pace.rounds, LONG_TTL)] * SIZE,
        ),
        Act(
            "The holder is killed",
            f"The same again, {pace.rounds_3} rounds each, but worker {VICTIM + 1} gets SIGKILL in the middle of one: "
            f"after the read and before the write, without a chance to release. The ttl is {TTL:g}{NBSP}s.",
            crash,
        ),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Four worker processes share one counter: without a lock, with the lock, and\n"
        "with the lock while one of them is killed. It needs no server: the locks are in\n"
        "an SQLite file in a temporary folder, which is removed at the end."
    )
    parser.epilog = "examples:\n  $ lockfast demo\n  $ lockfast demo --url redis://localhost:6379"
    parser.add_argument("--url", help="use this store instead, for instance redis://localhost:6379")
    parser.add_argument("--quick", action="store_true", help="take about three seconds")


def run(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and so does the demo then
                stack.callback(signal.signal, number, signal.signal(number, _exit_on_signal))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockfast-demo-")))
        crew = stack.enter_context(Crew())
        # A second Ctrl-C must not interrupt the clean-up.
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        url = args.url or f"sqlite:///{folder / 'locks.db'}"
        if url.lower().startswith("memory:"):
            raise ConfigurationError(
                "The demo starts several processes, and memory:// exists in one only. Use another store."
            )
        with lockfast.connect(url, store_timeout=STORE_TIMEOUT) as locks:
            locks.lock(NAME).inspect()  # fails now, not in the middle of the first act
        return _perform(Terminal(), crew, folder / "counter", url, QUICK if args.quick else FULL, own=not args.url)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _perform(terminal: Terminal, crew: Crew, path: Path, url: str, pace: Pace, *, own: bool) -> int:
    where = "an SQLite file in a temporary folder; no server is needed" if own else "the store in --url"
    terminal.say(f"lockfast {lockfast.__version__}: what a lock does, in three acts", "bold")
    terminal.say(f"The locks are in {where}.", indent="  ")
    crew.start(SIZE, path, url)
    table: list[Line] = [[], [(f"  {'act':<26}{'updates':>9}{'in the file':>14}{'lost':>7}", "dim")]]
    scenes = []
    for number, act in enumerate(acts(pace), 1):
        scenes.append(scene := _perform_act(terminal, number, act, crew, path, pace))
        row = f"  {number}  {act.title:<23}{scene.made:>9}{scene.total:>14}"
        table.append([(row, ""), (f"{scene.lost:>7}", "red" if scene.lost else "green")])
    terminal.lines([*table, []])
    terminal.say("The code for this:", indent="  ")
    terminal.lines([[], *([("    " + line, "cyan")] for line in CODE.splitlines()), []])
    terminal.say("Read more in README.md and docs/, or run `python -m pydoc lockfast`.", indent="  ")
    return 0 if all(scene.kept for scene in scenes) else 1


def _perform_act(terminal: Terminal, number: int, act: Act, crew: Crew, path: Path, pace: Pace) -> Scene:
    terminal.say()
    terminal.say(f"Act {number}. {act.title}", "bold")
    terminal.say(act.intro, indent="  ")
    terminal.say()
    if terminal.live:
        time.sleep(pace.reading)
    with Block(terminal) as block:
        scene = _play(act, crew, path, pace, lambda scene: block.draw(_drawing(terminal, scene)))
    explain(terminal, scene)
    return scene


def _play(act: Act, crew: Crew, path: Path, pace: Pace, draw: Callable[[Scene], None]) -> Scene:
    """Play an act to its end. A timer calls `draw`, not the reports: they come when no worker holds the lock."""
    write_counter(path, 0)
    scene = Scene(len(act.orders), act.orders[0].rounds, act.orders[0].ttl is not None)
    for worker, order in zip(crew.workers, act.orders, strict=True):
        worker.order(order)
    draw_at = time.monotonic()
    while not scene.over:
        for index, kind, value in crew.receive(max(0.0, draw_at - time.monotonic())):
            scene.update(index, kind, value, time.monotonic())
        now = time.monotonic()
        if scene.stalled_at is not None and scene.killed_at is None and now - scene.stalled_at >= pace.linger:
            crew.kill(VICTIM)
            scene.kill(time.monotonic())
        if now >= draw_at:
            scene.total = int(path.read_text("ascii"))
            draw(scene)
            draw_at = now + FRAME
    scene.total = int(path.read_text("ascii"))
    draw(scene)
    return scene


@dataclass
class Scene:
    """The state of an act, from the workers' messages; `total` is the number in the file. Times are None until their
    event happens. `successor` is the first worker that held the lock after the kill."""

    size: int
    rounds_each: int
    locked: bool
    states: list[str] = field(init=False)
    rounds: list[tuple[int, Round]] = field(default_factory=list)
    total: int = 0
    fence: int = 0
    victim: int | None = None
    stalled_at: float | None = None
    killed_at: float | None = None
    successor: int | None = None
    succeeded_at: float | None = None

    def __post_init__(self) -> None:
        self.states = [WAITING if self.locked else WORKING] * self.size

    def update(self, index: int, kind: str, value: Any, now: float) -> None:
        """Apply a message of worker `index`."""
        if kind == HOLDS:
            self.states[index] = HOLDING
            self.fence = max(self.fence, value)
            if self.killed_at is not None and self.succeeded_at is None:
                self.successor, self.succeeded_at = index, now
        elif kind == DID:
            self.states[index] = WAITING if self.locked else WORKING
            self.rounds.append((index, Round(*value)))
        elif kind == STALLS:
            self.victim, self.stalled_at = index, now
        elif kind == DONE:
            self.states[index] = FINISHED

    def kill(self, now: float) -> None:
        if self.victim is not None:
            self.states[self.victim] = KILLED
            self.killed_at = now

    @property
    def over(self) -> bool:
        return all(state in (FINISHED, KILLED) for state in self.states)

    @property
    def made(self) -> int:
        return len(self.rounds)

    @property
    def lost(self) -> int:
        return self.made - self.total

    @property
    def kept(self) -> bool:
        """False if the lock broke a promise."""
        return not self.locked or (self.lost == 0 and self.fences()[2])

    def seconds(self) -> float:
        """From the start of the first round to the end of the last."""
        return max(one.released_at for _, one in self.rounds) - min(one.held_at for _, one in self.rounds)

    def handoff(self) -> float:
        """Median seconds between the end of a round and the start of the next."""
        rounds = sorted(one for _, one in self.rounds)
        return statistics.median(later.held_at - one.released_at for one, later in pairwise(rounds))

    def counts_at_first_finish(self) -> list[int]:
        """How many rounds the other workers had started when the first finished: a measure of fairness."""
        ends = [max(one.released_at for worker, one in self.rounds if worker == index) for index in range(self.size)]
        first = ends.index(min(ends))
        started = [worker for worker, one in self.rounds if one.held_at < ends[first]]
        return [started.count(index) for index in range(self.size) if index != first]

    def fences(self) -> tuple[int, int, bool]:
        """The smallest and the greatest fence, and whether the fence grew with every round."""
        fences = [one.fence for one in sorted(one for _, one in self.rounds)]
        return min(fences), max(fences), all(fence < later for fence, later in pairwise(fences))


def _drawing(terminal: Terminal, scene: Scene) -> list[Line]:
    """The scene as lines; after its end only the workers, since the findings follow."""
    workers = [_worker_line(terminal, scene, index) for index in range(scene.size)]
    return workers if scene.over else [*workers, _file_line(scene), _event_line(scene)]


def _worker_line(terminal: Terminal, scene: Scene, index: int) -> Line:
    state, count = scene.states[index], sum(worker == index for worker, _ in scene.rounds)
    width = max(4, min(MAX_BAR, terminal.width - AROUND_BAR))
    full = round(width * count / scene.rounds_each)
    done, left = ("█", "░") if terminal.symbols else ("#", ".")
    style = STATE_STYLES[state]
    return [
        (f"  worker {index + 1}  ", ""),
        (f"{state:<9}", style),
        (done * full, style if state in (HOLDING, KILLED) else "cyan"),
        (left * (width - full), "dim"),
        (f"  {count:>3}/{scene.rounds_each}", ""),
    ]


def _file_line(scene: Scene) -> Line:
    made = max(scene.made, scene.total)  # the file may be ahead of the reports
    missing = made - scene.total
    line = [
        (f"  {made} updates made, {scene.total} in the file, ", ""),
        (f"{missing} lost", "red" if missing else "green"),
    ]
    return [*line, (f", fence {scene.fence}", "dim")] if scene.locked else line


def _event_line(scene: Scene) -> Line:
    if scene.victim is None:
        return []
    victim = f"  worker {scene.victim + 1}"
    if scene.killed_at is None:
        return [(f"{victim} holds the lock and is about to be killed.", "yellow")]
    if scene.succeeded_at is None or scene.successor is None:
        return [(f"{victim} was killed {time.monotonic() - scene.killed_at:.1f} s ago; the others wait.", "yellow")]
    after = scene.succeeded_at - scene.killed_at
    return [(f"{victim} was killed; worker {scene.successor + 1} held the lock {after:.2f} s later.", "green")]


def explain(terminal: Terminal, scene: Scene) -> None:
    if scene.killed_at is not None and scene.successor is not None and scene.succeeded_at is not None:
        after = scene.succeeded_at - scene.killed_at
        _check(
            terminal,
            after <= TTL + LATE,
            f"{after:.2f}{NBSP}s after worker {VICTIM + 1} was killed, worker {scene.successor + 1} held the "
            "lock: the lock of a dead process expires at the end of its ttl.",
        )
    lost = {0: "none was lost", 1: "1 was lost"}.get(scene.lost, f"{scene.lost} were lost")
    if scene.lost < 0:
        lost = f"{-scene.lost} too many"
    _check(terminal, scene.lost == 0, f"{scene.made} updates were made and the file says {scene.total}: {lost}.")
    if not scene.locked:
        race = "Whenever two workers read the same number, one of the two updates is overwritten."
        _point(terminal, race if scene.lost else "That was luck: run it again.")
        return
    if scene.killed_at is not None:
        _point(terminal, "The interrupted round was never written, so it counts on neither side.")
    else:
        _explain_speed(terminal, scene)
    first, last, rose = scene.fences()
    if rose:
        _point(terminal, f"The fence grew with each of the {scene.made} rounds, from {first} to {last}.")
    else:
        _check(terminal, False, f"The fence did not grow with each round (from {first} to {last}).")


def _explain_speed(terminal: Terminal, scene: Scene) -> None:
    count, seconds = scene.made, scene.seconds()
    *most, last = sorted(scene.counts_at_first_finish(), reverse=True)
    _point(
        terminal,
        f"{count} rounds took {seconds:.1f}{NBSP}s, {count / seconds:.0f} per second. Each waited "
        f"{PAUSE * 1000:g}{NBSP}ms between read and write; a hand-off took {scene.handoff() * 1000:.1f}{NBSP}ms "
        "(median).",
    )
    fair = scene.rounds_each - last <= max(2, scene.rounds_each * UNFAIR)
    _point(
        terminal,
        f"{'The queue is fair' if fair else 'The order was uneven this time'}: when the first worker had finished its "
        f"{scene.rounds_each} rounds, the others had done {', '.join(map(str, most))} and {last}.",
    )


def _check(terminal: Terminal, good: bool, text: str) -> None:
    sign = ("✓" if good else "✗") if terminal.symbols else ("+" if good else "!")
    terminal.say(f"{sign} {text}", "green" if good else "red", indent="  ", hang="    ")


def _point(terminal: Terminal, text: str) -> None:
    terminal.say(f"{'·' if terminal.symbols else '-'} {text}", indent="  ", hang="    ")


def encode(kind: str, value: Any = None) -> bytes:
    r"""Encode a message.

    >>> encode(DID, Round(1.5, 2.5, 7))
    b'["did", [1.5, 2.5, 7]]\n'
    """
    return json.dumps([kind, value]).encode() + b"\n"


def write_counter(path: Path, number: int) -> None:
    """Replace the file atomically: a killed worker has either written or not. Read plus write is not atomic, which is
    why the workers need a lock."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(str(number), "ascii")
    draft.replace(path)


def work(path: Path) -> int:
    """In a worker: carry out orders until stdin ends."""
    orders: SimpleQueue[Order | None] = SimpleQueue()
    threading.Thread(target=_read_orders, args=[orders], daemon=True).start()
    try:
        with lockfast.connect() as locks:
            _send(READY)
            while order := orders.get():
                _carry_out(order, path, locks)
                _send(DONE)
    except LockError as error:
        _send(FAILED, str(error))
        return 1
    return 0


def _read_orders(orders: SimpleQueue[Order | None]) -> None:
    for line in sys.stdin.buffer:
        orders.put(Order(*json.loads(line)[1]))
    orders.put(None)
    time.sleep(EXIT_TIMEOUT)
    os._exit(1)


def _send(kind: str, value: Any = None) -> None:
    os.write(1, encode(kind, value))  # shorter than PIPE_BUF, so the write is atomic


def _carry_out(order: Order, path: Path, locks: lockfast.Locks) -> None:
    for number in range(1, order.rounds + 1):
        with _lock_for(order, locks) as fence:
            held_at = time.monotonic()
            before = int(path.read_text("ascii"))
            if number == order.stall_at:
                _send(STALLS)
                time.sleep(STALL)
            time.sleep(PAUSE)
            write_counter(path, before + 1)
            released_at = time.monotonic()
        _send(DID, Round(held_at, released_at, fence))


@contextmanager
def _lock_for(order: Order, locks: lockfast.Locks) -> Iterator[int]:
    if order.ttl is None:
        yield 0
    else:
        with locks.lock(NAME, ttl=order.ttl, timeout=TIMEOUT) as lease:
            _send(HOLDS, lease.fence)
            yield lease.fence


class Worker:
    """One process, in its own process group: Ctrl-C reaches only the parent, which ends the workers by pid."""

    def __init__(self, number: int, counter: Path, url: str) -> None:
        self.number = number
        self._log = counter.with_name(f"worker-{number}.log")
        self._unread = b""
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockfast.cli.demo", str(counter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                process_group=0,
                # The worker imports the same lockfast as its parent.
                env={**os.environ, "LOCKFAST_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.stdin, self.stdout = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def order(self, order: Order) -> None:
        try:
            self.stdin.write(encode("order", order))
        except BrokenPipeError:
            raise self._exited() from None

    def messages(self) -> Iterator[tuple[str, Any]]:
        """The new messages. Blocks unless the pipe is readable."""
        new = os.read(self.stdout.fileno(), 65536)
        if not new:
            raise self._exited()
        *lines, self._unread = (self._unread + new).split(b"\n")
        for line in lines:
            kind, value = json.loads(line)
            if kind == FAILED:
                raise LockError(f"Worker {self.number} failed: {value}")
            yield kind, value

    def _exited(self) -> LockError:
        last = self._log.read_text(errors="replace").splitlines()[-1:] or ["it printed no error"]
        return LockError(f"Worker {self.number} exited unexpectedly, so the demo ends: {clean(last[0])}.")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Wait for its exit, and kill it if that takes too long."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * EXIT_TIMEOUT)
        self.kill()
        self.stdin.close()
        self.stdout.close()


class Crew:
    """All workers. Leaving the context ends them: by the end of their stdin, or after an error by SIGKILL."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._pipes = selectors.DefaultSelector()
        self._last_message_at = time.monotonic()

    def start(self, size: int, counter: Path, url: str) -> None:
        """Start `size` workers; return when all are ready."""
        for number in range(1, size + 1):
            self.workers.append(worker := Worker(number, counter, url))
            self._pipes.register(worker.stdout, selectors.EVENT_READ, worker)
        ready = 0
        while ready < size:
            ready += sum(kind == READY for _, kind, _ in self.receive(1.0))

    def receive(self, timeout: float) -> list[tuple[int, str, Any]]:
        """Wait up to `timeout` seconds for messages: (index of the worker, kind, value)."""
        received: list[tuple[int, str, Any]] = []
        for key, _ in self._pipes.select(timeout):
            received += [(key.data.number - 1, kind, value) for kind, value in key.data.messages()]
        now = time.monotonic()
        if received:
            self._last_message_at = now
        elif now - self._last_message_at > SILENCE:
            raise LockError(f"No worker sent a message for {SILENCE:g} s, so the demo ends.")
        return received

    def kill(self, index: int) -> None:
        self._pipes.unregister(self.workers[index].stdout)
        self.workers[index].kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self.workers:
            if kind is None:
                worker.stdin.close()
            else:
                worker.kill()
        for worker in self.workers:
            worker.close()
        self._pipes.close()


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
