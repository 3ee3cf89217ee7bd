"""A proxy before ZooKeeper that delays one write or loses the reply to it, as a network may."""

import socket
import struct
import threading
from types import TracebackType
from typing import Self

from tests.support.servers import HOST

WRITES = {1: "create", 2: "delete", 5: "set data", 14: "transaction"}
"""Types of ZooKeeper's requests."""


class ZooKeeperProxy:
    """Forwards everything. After `hold()`, the next write below `path` and all later requests wait for `let_go()`.

    After `lose_reply()`, the connection ends when the server replies to the next write below `path`. `lost` is set
    then.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server((HOST, 0))
        self.url = f"zookeeper://{HOST}:{self._listener.getsockname()[1]}"
        self._path = self._losing_path = b""
        self._losing: set[socket.socket] = set()
        self.lost = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self.held = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, path: str) -> None:
        self._path = path.encode()

    def lose_reply(self, path: str) -> None:
        self._losing_path = path.encode()

    def let_go(self) -> None:
        self._path = b""
        self._open.set()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection((HOST, self._server_port))
            self._sockets += [client, server]
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
            threading.Thread(target=self._replies, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        try:
            with client.makefile("rb") as stream:
                while len(head := stream.read(4)) == 4:
                    body = stream.read(struct.unpack("!i", head)[0])
                    if self._path and self._path in body and _is_write(body):
                        self._open.clear()
                        self.held.set()
                    self._open.wait()
                    if self._losing_path and self._losing_path in body and _is_write(body):
                        self._losing_path = b""
                        self._losing.add(server)
                    server.sendall(head + body)
            server.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side is gone

    def _replies(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(65_536):
                if server in self._losing:
                    server.shutdown(socket.SHUT_RDWR)
                    self.lost.set()
                    break
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        for one in self._sockets:
            one.close()


def _is_write(body: bytes) -> bool:
    return len(body) >= 8 and struct.unpack("!i", body[4:8])[0] in WRITES
