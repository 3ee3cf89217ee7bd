"""The demo's workers: processes that carry out orders and report each round, and the parent's side of them.

    parent → worker (stdin)     order, an Order        do so many rounds
                                end of file            exit
    worker → parent (stdout)    ready                  ready for an order
                                holds, the fence       acquired the lock
                                stalls                 stopped between read and write
                                did, a Round           finished a round
                                done                   finished the order
                                failed, the error      cannot continue

A worker is started with `python -m` and the counter's path. A message is one line with a JSON array. The store's URL
comes in LOCKFAST_URL, which other users cannot read. When stdin ends, the worker exits, whatever it does: it never
outlives its parent.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, Self, cast

import lockfast
from lockfast.errors import LockError
from lockfast.values import clean

NAME = "demo:counter"
TIMEOUT = 30.0  # seconds to wait for the lock; many times the expected wait
STALL = 60.0  # seconds; the parent kills the worker much earlier
EXIT_TIMEOUT = 1.0  # seconds that a worker has to exit by itself after the end of stdin; its parent waits twice as long
SILENCE = 40.0  # seconds without any message after which the demo gives up

READY, HOLDS, STALLS, DID, DONE, FAILED = "ready", "holds", "stalls", "did", "done", "failed"


class Order(NamedTuple):
    """Do `rounds` rounds with `pause` seconds between read and write, under the lock unless `ttl` is None. In round
    `stall_at` (from 1), stop between read and write."""

    rounds: int
    pause: float
    ttl: float | None = None
    stall_at: int | None = None


class Round(NamedTuple):
    """One finished round. Times are of the monotonic clock, which all processes of a machine share."""

    held_at: float
    released_at: float
    fence: int = 0


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


def main(path: Path) -> int:
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
            time.sleep(order.pause)
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
    """One process. `alive` is false once the parent has killed it: then the end of its pipe is no error.

    It has its own process group: Ctrl-C reaches only the parent, which ends the workers by pid."""

    def __init__(self, number: int, counter: Path, url: str) -> None:
        self.number = number
        self.alive = True
        self._log = counter.with_name(f"worker-{number}.log")
        self._unread = b""
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockfast.cli.demo_worker", str(counter)],
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
        if not new and self.alive:
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
        self.alive = False
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """Wait for its exit, and kill it if that takes too long."""
        try:
            self.process.wait(2 * EXIT_TIMEOUT if self.alive else 0)
        except subprocess.TimeoutExpired:
            pass
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
    sys.exit(main(Path(sys.argv[1])))
