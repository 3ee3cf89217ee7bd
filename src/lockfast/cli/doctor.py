"""`lockfast doctor`: whether a store is fit to keep locks, one verdict a line, in plain words.

Rules kept here: everything is found out by doing it, with a lock of a name that nobody uses, or by asking the server;
what could not be found out is called unknown; each bad line says what to do. Nothing is left behind but the fence.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import lockfast
from lockfast.cli.common import add_store, connect, print_json
from lockfast.cli.terminal import Terminal
from lockfast.cli.words import ago
from lockfast.errors import LockError

OK, NOTE, UNKNOWN, BAD = "ok", "note", "unknown", "bad"
STYLES = {OK: "green", NOTE: "yellow", UNKNOWN: "yellow", BAD: "red"}
VERDICTS = {"yes": OK, "if": NOTE, "no": NOTE, "unknown": UNKNOWN, "danger": BAD}
"""What a line of `locks.guarantees()` comes to here."""

PROBES = 20
SLOW = 0.02
"""Seconds of round trip beyond which the bounds of a timeout are looser than promised."""
HAND_OVER_WITHIN = 3.0
OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
TTL = 5.0
PERMISSIONS = "docs/permissions.md has the line to paste."


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    verdict: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check a store: connect, measure, take and hand over a lock, and ask the server about its\n"
        "memory, persistence, replicas and clock. Nothing is left behind but a fence, for a day."
    )
    parser.epilog = (
        "exit codes: 0 fit to keep locks, 1 something is bad or the store cannot be used\n\n"
        "examples:\n  $ lockfast doctor --url redis://cache:6379\n  $ lockfast doctor --json"
    )
    parser.add_argument("--name", help="try with this lock: a name that the account may use and nobody else does")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    findings: list[Finding] = []
    terminal = Terminal()
    with connect(args) as locks:
        name = args.name or f"lockfast-doctor:{locks.runtime.new_holder_id()}"
        for finding in examine(args, locks, name):
            findings.append(finding)
            if not args.json:
                _print(terminal, finding)
    bad = sum(finding.verdict == BAD for finding in findings)
    if args.json:
        print_json({"fit": not bad, "findings": [finding._asdict() for finding in findings]})
    else:
        _conclude(terminal, bad)
    return 1 if bad else 0


def _print(terminal: Terminal, finding: Finding) -> None:
    lead = f"{finding.verdict:<8} {finding.topic:<12} "
    terminal.say(lead + finding.text, STYLES[finding.verdict] if finding.verdict != OK else "", hang=" " * len(lead))


def _conclude(terminal: Terminal, bad: int) -> None:
    terminal.say()
    if bad:
        terminal.say(f"{bad} of these must be mended before locks can be trusted here.", "bold")
    else:
        terminal.say("This store is fit to keep locks.", "bold")


def examine(args: argparse.Namespace, locks: lockfast.Locks, name: str) -> Iterator[Finding]:
    """All findings, each as soon as it is known; no more when the store cannot even be reached."""
    try:
        yield from _speed(locks, name)
    except LockError as error:
        yield Finding("connection", BAD, str(error))
        return
    yield from _server(locks)
    with connect(args) as other:
        for check in (_taking, _queueing, _breaking, _listing):
            yield check(locks, other, name)
    yield _watching(locks)


def _speed(locks: lockfast.Locks, name: str) -> Iterator[Finding]:
    started = time.perf_counter()
    locks.lock(name).inspect()
    yield Finding("connection", OK, f"{str(locks).strip('<>')}, connected in {ago(time.perf_counter() - started)}.")
    trip = median(_timed(lambda: locks.lock(name).inspect()) for _ in range(PROBES))
    if trip > SLOW:
        text = f"{trip * 1000:.1f} ms: timeouts may be overrun by a few round trips on a link this slow."
        yield Finding("round trip", NOTE, text)
    else:
        yield Finding("round trip", OK, f"{trip * 1000:.2f} ms.")


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _server(locks: lockfast.Locks) -> Iterator[Finding]:
    """What the server tells of itself, and what that means."""
    try:
        found = locks.guarantees()
    except LockError as error:
        yield Finding("server", UNKNOWN, f"It does not tell about itself: {error}")
        return
    facts = found.facts
    yield _version(facts.engine, facts.version, facts.shown)
    if facts.clock_offset is not None:
        yield Finding(
            "clock", OK if abs(facts.clock_offset) < 1 else NOTE, f"Within {abs(facts.clock_offset):.3f} s of ours."
        )
    for line in found.lines:
        if line.topic not in ("clock", "stopped"):
            yield Finding(line.topic, VERDICTS[line.verdict.value], line.text)


def _version(engine: str, version: str | None, shown: str) -> Finding:
    least = OLDEST.get(engine)
    if least is None:
        return Finding("server", OK, f"{shown}.")
    try:
        number = tuple(int(part) for part in (version or "").split(".")[:2])
    except ValueError:
        number = ()
    if not number:
        return Finding("server", UNKNOWN, f"{shown}: its version is unknown; {least[0]}.{least[1]} or later is needed.")
    if number < least:
        return Finding("server", BAD, f"{shown} is too old: update it to {least[0]}.{least[1]} or later.")
    return Finding("server", OK, f"{shown}.")


def _checked(topic: str, check: Callable[[], str]) -> Finding:
    """What `check` found to be well, or how it failed."""
    try:
        return Finding(topic, OK, check())
    except LockError as error:
        return Finding(topic, BAD, f"{error} {PERMISSIONS if isinstance(error, lockfast.StoreRefused) else ''}".strip())


def _taking(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> Finding:
    def check() -> str:
        lock = locks.lock(name, ttl=TTL)
        lease = lock.acquire(timeout=0)
        if lease is None:
            raise LockError(f"{name} is taken by another; give --name with a lock that nobody uses.")
        try:
            lease.renew()
            if other.lock(name).acquire(timeout=0) is not None:
                raise LockError("Two connections hold the same lock: this store does not exclude anybody.")
        finally:
            lease.release()
        return "A lock can be taken, renewed and given back, and keeps others out."

    return _checked("locking", check)


def _queueing(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> Finding:
    def check() -> str:
        lease = locks.lock(name, ttl=TTL).acquire(timeout=TTL)
        if lease is None:
            raise LockError(f"{name} is taken by another; give --name with a lock that nobody uses.")
        got: list[float] = []
        waiter = threading.Thread(target=lambda: got.extend(_wait_for(other, name)), daemon=True)
        waiter.start()
        give_up_at = time.perf_counter() + HAND_OVER_WITHIN
        while locks.lock(name).inspect().waiting == 0 and time.perf_counter() < give_up_at:
            time.sleep(0.002)
        released = time.perf_counter()
        lease.release()
        waiter.join(2 * HAND_OVER_WITHIN)
        if not got:
            raise LockError("Who waited did not get the lock: see whether SUBSCRIBE and PUBLISH are allowed.")
        took = got[0] - released
        if took > 0.5:
            raise LockError(f"A hand-over took {ago(took)}: messages do not arrive (SUBSCRIBE and PUBLISH).")
        return f"Who waits is woken by a message: a hand-over took {took * 1000:.1f} ms."

    return _checked("waiting", check)


def _wait_for(locks: lockfast.Locks, name: str) -> list[float]:
    try:
        lease = locks.lock(name, ttl=TTL).acquire(timeout=HAND_OVER_WITHIN)
    except LockError:
        return []
    if lease is None:
        return []
    got = time.perf_counter()
    lease.release()
    return [got]


def _breaking(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> Finding:
    def check() -> str:
        lease = locks.lock(name, ttl=TTL).acquire(timeout=TTL)
        if lease is None or other.lock(name).force_release(lease.holder) is None:
            raise LockError("A lock could not be taken away from its holder.")
        return "A lock can be taken away from its holder (lockfast break)."

    return _checked("breaking", check)


def _listing(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> Finding:
    try:
        for _ in locks.list("lockfast-doctor:*"):
            pass
    except LockError as error:
        return Finding("listing", NOTE, f"lockfast ls will not work for this account (+scan): {error}")
    return Finding("listing", OK, "Locks can be listed (lockfast ls).")


def _watching(locks: lockfast.Locks) -> Finding:
    if locks.store.capabilities.change_events:
        return Finding("theft", OK, "A holder is told when somebody deletes or overwrites its lock.")
    return Finding("theft", NOTE, "A holder whose lock is taken away learns it at its next renewal, not before.")
