"""The rules of the proxy, and the requests it has seen.

Rules are bound when the proxy sees a *request*, also the rule for its reply, so after `wait_for` a test knows which
rules apply to it. The first rule that fits applies. A rule ends after `times` frames or when it is released.

The ledger is the only state that the proxy thread shares with other threads; one condition guards it.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tests.support.waiting import LONG

Match: TypeAlias = bytes | Callable[[Sequence[bytes]], bool]
Side: TypeAlias = Literal["request", "reply", "push"]
Effect: TypeAlias = Literal["drop", "delay", "hold", "half"]
# What happens after a drop. "silence" drops everything after it in that direction too, as a network that lost part of a
# stream; "continue" is for pushes, which a server may lose one by one.
Then: TypeAlias = Literal["close", "reset", "silence", "continue"]
Direction: TypeAlias = Literal["to_server", "to_client"]


def fits(match: Match, args: Sequence[bytes]) -> bool:
    """Whether the bytes occur in an argument, or the callable returns true; b"" fits every request."""
    return any(match in arg for arg in args) if isinstance(match, bytes) else match(args)


@dataclass(eq=False)
class Rule:
    """One fault. A test can wait until it has happened, and end it."""

    ledger: "Ledger"
    side: Side
    effect: Effect
    match: Match
    times: int | None = None
    seconds: float = 0.0
    then: Then = "close"
    # Used only by the proxy thread.
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    hits: int = 0

    def wait(self, count: int = 1, timeout: float = LONG) -> None:
        """Block until `count` frames have been held, delayed, dropped or cut in half."""
        self.ledger.wait(lambda: self.hits >= count, timeout, f"{count} × {self.effect} of a {self.side}")

    def release(self) -> None:
        """End the rule and forward the frames that it holds."""
        self.ledger.release(self)


class Ledger:
    """Requests seen, rules in force, connections open."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        # Runs a callable in the proxy thread.
        self._post = post
        self._changed = threading.Condition()
        self._rules: list[Rule] = []
        self._requests: list[list[bytes]] = []
        self._connections = 0
        self._stalled = 0
        self._failure: BaseException | None = None

    def add(self, rule: Rule) -> Rule:
        with self._changed:
            self._rules.append(rule)
        return rule

    def release(self, *rules: Rule) -> None:
        with self._changed:
            self._rules = [rule for rule in self._rules if rule not in rules]
        for rule in rules:
            self._post(rule.gate.set)

    def rules(self, effect: Effect | None = None) -> list[Rule]:
        with self._changed:
            return [rule for rule in self._rules if effect in (None, rule.effect)]

    def see_request(self, args: list[bytes]) -> tuple[Rule | None, Rule | None]:
        """Record a request; return the rule for it and the rule for its reply."""
        with self._changed:
            self._requests.append(args)
            self._changed.notify_all()
            rule = self._bind("request", args)
            # A dropped request has no reply, and must not consume a rule for replies.
            lost = rule is not None and rule.effect == "drop"
            return rule, None if lost else self._bind("reply", args)

    def see_push(self, args: list[bytes]) -> Rule | None:
        with self._changed:
            return self._bind("push", args)

    def _bind(self, side: Side, args: Sequence[bytes]) -> Rule | None:
        rule = next((rule for rule in self._rules if rule.side == side and fits(rule.match, args)), None)
        if rule is not None and rule.times is not None:
            rule.times -= 1
            if rule.times <= 0:
                self._rules.remove(rule)
        return rule

    def hit(self, rule: Rule) -> None:
        with self._changed:
            rule.hits += 1
            self._changed.notify_all()

    def count(self, *, connections: int = 0, stalled: int = 0) -> None:
        """Change the counts by these amounts."""
        with self._changed:
            self._connections += connections
            self._stalled += stalled
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record a failure of the proxy itself; the next wait raises it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def connections(self) -> int:
        return self._connections

    @property
    def stalled(self) -> int:
        return self._stalled

    def requests(self) -> list[list[bytes]]:
        with self._changed:
            return [list(args) for args in self._requests]

    def wait(self, reached: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure or reached(), timeout)
            if self._failure is not None:
                raise RuntimeError("the proxy failed") from self._failure
            if not reached():
                raise TimeoutError(f"waited {timeout:g} s for {what}; the last requests: {self._requests[-10:]}")

    def wait_for(self, match: Match, count: int, timeout: float) -> None:
        def reached() -> bool:
            return sum(fits(match, args) for args in self._requests) >= count

        self.wait(reached, timeout, f"{count} × a request that fits {match!r}")
