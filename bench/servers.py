"""Figures that a server reports about itself."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.servers import Server


def server_cpu(server: Server) -> float:
    """CPU seconds of the server so far."""
    info: str = server.raw("INFO", "cpu")
    used = dict(line.split(":", 1) for line in info.split() if ":" in line)
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def requests_by_lockfast(calls: Mapping[str, int]) -> int:
    """Requests of lockfast. The server also counts commands called by scripts; they are left out."""
    return sum(calls.get(name, 0) for name in ("evalsha", "eval", "subscribe", "ping"))
