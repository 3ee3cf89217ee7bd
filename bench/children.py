"""Forked processes to measure in, controlled over a pipe; they end with the benchmark."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tests.support import guardian

FORK = multiprocessing.get_context("fork")
"""Forked children start in milliseconds. The parent imports none of the measured libraries before."""
ANSWER_SECONDS = 60.0
WITHOUT_HIREDIS = "import sys; sys.modules['hiredis'] = None; "
"""Start of a one-line program that hides an installed hiredis."""


class ChildFailed(Exception):
    """A peer failed; the message says why."""


class _Failure(NamedTuple):
    text: str


class Child:
    """A process that runs `body(pipe)`. `request` sends an order and returns the answer."""

    def __init__(self, body: Callable[[Connection], None], cpus: set[int] | None = None) -> None:
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_live, args=(body, theirs, cpus), daemon=True)
        self._process.start()
        theirs.close()
        guardian.watch(self.pid)

    @property
    def pid(self) -> int:
        if self._process.pid is None:
            raise ChildFailed("the process did not start")
        return self._process.pid

    def send(self, order: Any) -> None:
        self._pipe.send(order)

    def receive(self, timeout: float = ANSWER_SECONDS) -> Any:
        if not self._pipe.poll(timeout):
            raise ChildFailed(f"no answer for {timeout:g} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise ChildFailed("the process ended") from None
        if isinstance(answer, _Failure):
            raise ChildFailed(answer.text)
        return answer

    def request(self, order: Any, timeout: float = ANSWER_SECONDS) -> Any:
        self.send(order)
        return self.receive(timeout)

    def kill(self) -> None:
        """Send SIGKILL, to simulate a crash."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        guardian.unwatch(self.pid)
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _live(body: Callable[[Connection], None], pipe: Connection, cpus: set[int] | None) -> None:
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        body(pipe)
    except (EOFError, KeyboardInterrupt):
        pass
    except BaseException as error:
        pipe.send(_Failure(f"{type(error).__name__}: {error}"))


@contextmanager
def closing(children: dict[str, Child] | list[Child]) -> Iterator[None]:
    try:
        yield
    finally:
        for child in list(children.values()) if isinstance(children, dict) else children:
            child.close()


class Placement(NamedTuple):
    """The cores of the server and of the clients; None leaves the choice to the scheduler."""

    name: str
    server: set[int] | None
    clients: set[int] | None


def placements() -> list[Placement]:
    """Server and client on two cores, and both on one core.

    Without pinning, the scheduler chooses at random. A round trip that wakes a core costs several times as much, so the
    choice would decide the comparison.
    """
    if not hasattr(os, "sched_setaffinity"):
        return [Placement("unpinned", None, None)]
    cpus = sorted(os.sched_getaffinity(0))
    one_core = Placement("one core", {cpus[0]}, {cpus[0]})
    return [one_core] if len(cpus) == 1 else [Placement("two cores", {cpus[0]}, {cpus[1]}), one_core]


@contextmanager
def pinned(pid: int, cpus: set[int] | None) -> Iterator[None]:
    """Pin all threads of a process to `cpus` inside the block."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(pid)
    _pin(pid, cpus)
    try:
        yield
    finally:
        _pin(pid, before)


def _pin(pid: int, cpus: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - names only
        os.sched_setaffinity(int(thread), cpus)


def leave_out_hiredis() -> None:
    """Hide hiredis from this process and its forked children."""
    sys.modules["hiredis"] = None  # type: ignore[assignment] # None makes the import fail


def with_hiredis() -> None:
    """Allow hiredis in a forked process; call it before redis is imported."""
    if "redis" in sys.modules:
        raise RuntimeError("redis is already imported, without hiredis")
    sys.modules.pop("hiredis", None)
