"""A real ZooKeeper on loopback, from Debian's package; needs Java."""

import shutil
import socket
from pathlib import Path

from tests.support.outsiders import Outsider
from tests.support.servers import HOST

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


class ZooKeeper(Outsider):
    name = "zookeeper"
    starts_within = 30.0

    def __init__(self) -> None:
        super().__init__(ports=1)
        settings = self.folder / "zoo.cfg"
        settings.write_text(SETTINGS.format(folder=self.folder, port=self.port, host=HOST))
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        self._command = ["java", "-Xmx128m", "-cp", str(JAR), main, str(settings)]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as client:
                client.sendall(b"srvr")
                return client.recv(9) == b"Zookeeper"
        except OSError:
            return False
