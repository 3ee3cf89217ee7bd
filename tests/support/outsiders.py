"""A real server of another kind than Redis, with its own process and data directory."""

import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import guardian
from tests.support.servers import HOST, _reserve_port
from tests.support.waiting import until


class Outsider:
    """A server as a context manager. A subclass sets `_command`, which starts it, and `_answers`, which detects it."""

    name: str
    starts_within: float

    def __init__(self, ports: int) -> None:
        self._reserved: list[socket.socket] = [_reserve_port() for _ in range(ports)]
        self.ports: list[int] = [one.getsockname()[1] for one in self._reserved]
        self.port = self.ports[0]
        self.folder = Path(tempfile.mkdtemp(prefix=f"lockfast-{self.name}-"))
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.name}://{HOST}:{self.port}"

    def _answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, process_group=0)
        guardian.watch(self._process.pid)
        until(self._answers, f"{self.name} to answer", self.starts_within)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            guardian.unwatch(self._process.pid)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for one in self._reserved:
            one.close()
        shutil.rmtree(self.folder)
