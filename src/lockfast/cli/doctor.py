"""`lockfast doctor`: check whether a store is safe for locks, one finding per line.

Each finding comes from trying the operation on an unused lock name or from the server's own answers; anything else is
"unknown". Each bad finding says what to do. The checks leave only a fence behind.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from secrets import token_hex
from statistics import median
from typing import NamedTuple

import lockfast
from lockfast.cli.arguments import STORE_TIMEOUT, add_store, connect, print_json
from lockfast.cli.measure import acquired, handoff, timed
from lockfast.cli.terminal import Terminal
from lockfast.cli.view import duration
from lockfast.errors import LockError

OK, NOTE, UNKNOWN, BAD = "ok", "note", "unknown", "bad"
STYLES = {OK: "", NOTE: "yellow", UNKNOWN: "yellow", BAD: "red"}
VERDICTS = {"yes": OK, "if": NOTE, "no": NOTE, "unknown": UNKNOWN, "danger": BAD}  # of `locks.guarantees()`
SLOW = 0.02  # seconds; above this round trip, timeouts may overrun
MAX_HANDOFF = 0.5  # seconds; a slower hand-off means that the waiter polled
MIN_VERSIONS = {"redis": (6, 2), "valkey": (7, 2)}
PERMISSIONS = "docs/permissions.md lists the commands that the account needs."


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    verdict: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check a store: connect, measure, acquire and hand off a lock, and query the\n"
        "server's memory, persistence, replicas and clock. Leaves only a fence behind,\n"
        "for a day."
    )
    parser.epilog = (
        "exit codes: 0 safe for locks, 1 not safe, or the store is unavailable\n\n"
        "examples:\n  $ lockfast doctor --url redis://cache:6379\n  $ lockfast doctor --json"
    )
    parser.add_argument("--name", help="an unused lock name to test with; the account must be allowed to use it")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    findings: list[Finding] = []
    terminal = Terminal()
    with connect(args) as locks:
        for finding in examine(args, locks, args.name or f"lockfast-doctor:{token_hex(8)}"):
            findings.append(finding)
            if not args.json:
                head = f"{finding.verdict:<8} {finding.topic:<14} "
                terminal.say(head + finding.text, STYLES[finding.verdict], hang=" " * len(head))
    bad = sum(finding.verdict == BAD for finding in findings)
    if args.json:
        print_json({"fit": not bad, "findings": [finding._asdict() for finding in findings]})
    else:
        terminal.say()
        count = f"{bad} findings are" if bad > 1 else "1 finding is"
        unsafe = f"{count} bad: fix that before you rely on locks in this store."
        terminal.say(unsafe if bad else "This store is safe for locks.", "bold")
    return 1 if bad else 0


def examine(args: argparse.Namespace, locks: lockfast.Locks, name: str) -> Iterator[Finding]:
    """Yield each finding as soon as it is known; stop if the store is unreachable."""
    lock = locks.lock(name)
    try:
        connected = timed(lock.inspect)
        yield Finding("connection", OK, f"{str(locks).strip('<>')}, connected in {duration(connected)}.")
        trip = median(timed(lock.inspect) for _ in range(20))
    except LockError as error:
        yield Finding("connection", BAD, str(error))
        return
    slow = f"{trip * 1000:.1f} ms: on a link this slow, timeouts may overrun by a few round trips."
    yield Finding("round trip", NOTE, slow) if trip > SLOW else Finding("round trip", OK, f"{trip * 1000:.2f} ms.")
    yield from _server(locks)
    with connect(args) as other:
        yield _sharing(locks, other, name)
        for topic, check in (("locking", _exclusion), ("waiting", _handoff), ("force release", _force_release)):
            try:
                yield Finding(topic, OK, check(locks, other, name))
            except lockfast.StoreRefused as error:
                yield Finding(topic, BAD, f"{error} {PERMISSIONS}")
            except LockError as error:
                yield Finding(topic, BAD, str(error))
    try:
        list(locks.list("lockfast-doctor:*"))
        yield Finding("listing", OK, "Locks can be listed (lockfast ls).")
    except LockError as error:
        yield Finding("listing", NOTE, f"lockfast ls does not work for this account (+scan): {error}")
    if locks.session.store.capabilities.change_events:
        yield Finding("key events", OK, "A holder is notified if its lock is deleted or overwritten.")
    else:
        yield Finding("key events", NOTE, "A holder whose lock is deleted or overwritten notices at its next renewal.")


def _sharing(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> Finding:
    """Try what the store offers beside exclusive locks. Few accounts need it, so a refusal is a note."""
    offered = locks.session.store.capabilities
    try:
        if offered.readers:
            with _reader(locks, name), _reader(other, name):
                pass
        if offered.permits:
            with _permit(locks, name), _permit(other, name):
                pass
    except LockError as error:
        return Finding("sharing", NOTE, f"Readers or permits do not work for this account: {error} {PERMISSIONS}")
    if offered.readers and offered.permits:
        return Finding("sharing", OK, "Readers share a lock, and so do the holders of permits.")
    return Finding("sharing", NOTE, "Readers share a lock." if offered.readers else "Every lock has one holder.")


def _reader(locks: lockfast.Locks, name: str) -> lockfast.Lock:
    return locks.rwlock(name, timeout=STORE_TIMEOUT).reader


def _permit(locks: lockfast.Locks, name: str) -> lockfast.Semaphore:
    return locks.semaphore(name, 2, timeout=STORE_TIMEOUT)


def _server(locks: lockfast.Locks) -> Iterator[Finding]:
    """Findings from the server's answers about itself."""
    try:
        found = locks.guarantees()
    except LockError as error:
        yield Finding("server", UNKNOWN, f"The server did not answer about itself: {error}")
        return
    facts = found.facts
    yield _version(facts.engine, facts.version, facts.shown)
    if facts.clock_offset is not None:
        offset = abs(facts.clock_offset)
        yield Finding("clock", OK if offset < 1 else NOTE, f"Within {offset:.3f} s of this machine's clock.")
    for line in found.lines:
        if line.topic not in ("clock", "stopped"):
            yield Finding(line.topic, VERDICTS[line.verdict.value], line.text)


def _version(engine: str, version: str | None, shown: str) -> Finding:
    if engine not in MIN_VERSIONS:
        return Finding("server", OK, f"{shown}.")
    oldest = ".".join(map(str, MIN_VERSIONS[engine]))
    try:
        number = tuple(int(part) for part in (version or "").split(".")[:2])
    except ValueError:
        return Finding("server", UNKNOWN, f"{shown}: the version is unknown; lockfast needs {oldest} or later.")
    if number < MIN_VERSIONS[engine]:
        return Finding("server", BAD, f"{shown} is too old: upgrade to {oldest} or later.")
    return Finding("server", OK, f"{shown}.")


def _exclusion(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> str:
    lease = acquired(locks, name)
    try:
        lease.renew()
        if other.lock(name).acquire(timeout=0) is not None:
            raise LockError("Two connections hold the same lock: this store does not exclude other clients.")
    finally:
        lease.release()
    return "Acquire, renew and release work, and other clients are excluded."


def _handoff(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> str:
    seconds = handoff(locks, other, name)
    if seconds > MAX_HANDOFF:
        raise LockError(f"A hand-off took {duration(seconds)}: no notification arrived. Allow SUBSCRIBE and PUBLISH.")
    return f"A release notifies the next waiter: a hand-off took {seconds * 1000:.1f} ms."


def _force_release(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> str:
    lease = acquired(locks, name)
    if other.lock(name).force_release(lease.holder) is None:
        raise LockError("Another client's lease could not be ended.")
    return "An operator can end a lease (lockfast force-release)."
