"""What a server tells of itself while it is measured."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.servers import Server


def server_cpu(server: Server) -> float:
    """Seconds of processor time that the server has used."""
    info: str = server.raw("INFO", "cpu")
    used = dict(line.split(":", 1) for line in info.split() if ":" in line)
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def requests_by_lockfast(calls: Mapping[str, int]) -> int:
    """What lockfast sent, of all that the server counted: it counts what scripts call too."""
    return sum(calls.get(name, 0) for name in ("evalsha", "eval", "subscribe", "ping"))
