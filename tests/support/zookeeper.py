"""A real ZooKeeper on loopback, from Debian's package, where that and Java are installed."""

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

NEEDS = "Java and Debian's package zookeeper"
JAR = Path("/usr/share/java/zookeeper.jar")
SETTINGS = """\
tickTime=500
dataDir={folder}/data
clientPort={port}
clientPortAddress={host}
admin.enableServer=false
forceSync=no
"""


def find() -> Path | None:
    return JAR if JAR.exists() and shutil.which("java") else None


class ZooKeeper:
    """As a context manager: started, and ended with its data."""

    def __init__(self) -> None:
        self._reserved = _reserve_port()
        self.port = self._reserved.getsockname()[1]
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-zookeeper-"))
        settings = self.folder / "zoo.cfg"
        settings.write_text(SETTINGS.format(folder=self.folder, port=self.port, host=HOST))
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        self._command = ["java", "-Xmx128m", "-cp", str(JAR), main, str(settings)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"zookeeper://{HOST}:{self.port}"

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, process_group=0)
        guardian.watch(self._process.pid)
        until(self._answers, "ZooKeeper to answer", 30.0)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as client:
                client.sendall(b"srvr")
                return client.recv(9) == b"Zookeeper"
        except OSError:
            return False

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
        self._reserved.close()
        shutil.rmtree(self.folder)
