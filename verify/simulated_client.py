"""A client's place in a simulation: its process, its clock and its connections."""

from __future__ import annotations

from verify.process import Process


class Seat:
    """One client's place in the world: its process, its clock and its connections."""

    def __init__(self, number: int, rate: float, offset: float) -> None:
        self.number = number
        self.rate = rate
        self.offset = offset
        self.process: Process | None = None
        self.lives = 0
        self.stopped_until = 0.0
        self.sent = 0
        self.arrives_after = 0.0
        self.answers_after = 0.0
        self.pushes_after = 0.0

    def local(self, now: float) -> float:
        return self.offset + now * self.rate

    def true(self, local: float) -> float:
        return (local - self.offset) / self.rate
