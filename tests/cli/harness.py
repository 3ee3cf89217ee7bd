"""Run the real command: its output, its exit code and the processes it leaves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lockfast
from tests.support.terminal import LONGEST, Pty
from tests.support.waiting import until

LOCKFAST = [sys.executable, "-m", "lockfast"]


class Target:
    """A store, and an environment in which the command uses it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def is_embedded(self) -> bool:
        """Whether a command starts without loading the library."""
        return self.url.startswith("sqlite:")

    def environment(self, **more: str) -> dict[str, str]:
        unwanted = ("CI", "NO_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        return {**kept, "TERM": "xterm-256color", "LOCKFAST_URL": self.url, "PYTHONIOENCODING": "utf-8", **more}

    def run(self, *words: str, given: bytes | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command and return its output and exit code."""
        done = subprocess.run(
            [*LOCKFAST, *words],
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            env=self.environment(**variables),
            cwd=self.folder,
            capture_output=True,
            timeout=LONGEST,
            check=False,
        )
        out, err = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    def json(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.stderr == ""
        return json.loads(done.stdout)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start the command; it is killed at the end of the test."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen([*LOCKFAST, *words], env=self.environment(), cwd=self.folder, **options)
        self._started.append(process)
        return process

    def held(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a command that holds `name`, and return once it does."""
        process = self.start("run", name, *words, "--", "sh", "-c", "echo ready; exec sleep 300")
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def inspect(self, name: str) -> lockfast.LockInfo:
        with lockfast.connect(self.url) as locks:
            return locks.lock(name).inspect()

    def await_waiting(self, name: str, count: int, timeout: float = LONGEST) -> lockfast.LockInfo:
        with lockfast.connect(self.url) as locks:
            lock = locks.lock(name)

            def reached() -> lockfast.LockInfo | None:
                info = lock.inspect()
                return info if info.waiting == count else None

            return until(reached, f"{count} waiters", timeout)  # type: ignore[return-value]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def ended(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> int:
    """Send a signal, wait for the exit and return the code."""
    process.send_signal(number)
    return process.wait(LONGEST)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie counts as dead."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def await_gone(*pids: int) -> None:
    until(lambda: not any(map(is_alive, pids)), f"{pids} to be gone", LONGEST)


def descendants(pid: int) -> set[int]:
    """The living descendants of a process, in any group or session."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue  # it exited meanwhile
            parents[int(entry.name)] = int(fields[1])
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


Terminals = Callable[..., Pty]
