"""`locks.guarantees()`: what a connection promises and what it does not, derived from facts about its store.

Rules: limits are stated as plainly as promises. A fact that the server does not reveal is reported as unknown and
never assumed to be good. Each line has a verdict, so that a program can act on it. A danger is logged once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from lockfast.facts import Facts, Persistence, Topology

SAME_CLOCK = 1.0
"""Seconds by which a server's clock may differ from ours before it is mentioned."""


class Verdict(enum.Enum):
    """The result of one line of the guarantees.

    >>> Verdict.DANGER.value
    'danger'
    """

    YES = "yes"
    IF = "if"
    NO = "no"
    UNKNOWN = "unknown"
    DANGER = "danger"


class Guarantee(NamedTuple):
    """One line: a topic, a verdict and an explanation."""

    topic: str
    verdict: Verdict
    text: str

    def __str__(self) -> str:
        from textwrap import wrap

        lines = wrap(self.text, 88)
        return f"{self.topic:<12}{self.verdict.value:<9}" + ("\n" + " " * 21).join(lines)


class Guarantees(NamedTuple):
    """The promises and limits of a connection, to print or to query.

    >>> import lockfast
    >>> found = lockfast.connect("memory://").guarantees()
    >>> found.about("order").verdict.value, found.dangers
    ('yes', ())
    """

    facts: Facts
    lines: tuple[Guarantee, ...]

    @property
    def dangers(self) -> tuple[Guarantee, ...]:
        """The lines that need action."""
        return tuple(line for line in self.lines if line.verdict is Verdict.DANGER)

    def about(self, topic: str) -> Guarantee:
        """Return the line about `topic`; `KeyError` if there is none."""
        return {line.topic: line for line in self.lines}[topic]

    def __str__(self) -> str:
        return "\n".join([f"Locks on {self.facts.shown} ({self.facts.topology.value}):", *map(str, self.lines)])


def guarantees_of(facts: Facts) -> Guarantees:
    """Derive the guarantees from `facts`.

    >>> print(guarantees_of(Facts("valkey", eviction="allkeys-lru", memory_limit=100)).dangers[0].topic)
    eviction
    """
    rules = _quorum if facts.topology is Topology.QUORUM else _server if facts.reach == "network" else _local
    paused = (
        "A holder that is paused past its deadline (a stopped process, a suspended machine) may write once more when "
        "it resumes. Only a resource that checks the fence rejects that write."
    )
    return Guarantees(facts, (*rules(facts), _semaphores(facts), Guarantee("stopped", Verdict.NO, paused)))


def _local(facts: Facts) -> Iterator[Guarantee]:
    """One process or one host: all holders end when the store does."""
    yield Guarantee("one holder", Verdict.YES, f"At most one valid lease per name, within this {facts.reach}.")
    yield Guarantee("fences", Verdict.YES, "Strictly increase in the order of the grants.")
    yield _order(facts)
    text = "all holders end with it." if facts.reach == "process" else "fences continue; a reboot voids all grants."
    yield Guarantee("restart", Verdict.YES, f"Persistence: {_kept(facts.persistence)}; {text}")
    yield Guarantee("reach", Verdict.NO, f"Clients outside this {facts.reach} are not excluded.")


def _server(facts: Facts) -> Iterator[Guarantee]:
    """One master, alone or with replicas."""
    if facts.role == "replica":
        text = "This server is a replica, so it grants no locks. Connect to its master."
        yield Guarantee("one holder", Verdict.DANGER, text)
    else:
        text = "At most one valid lease per name, as long as the server keeps its data and its clock rate is right."
        yield Guarantee("one holder", Verdict.IF, text)
    yield Guarantee(
        "fences",
        Verdict.IF,
        "Strictly increase in the order of the grants, also across restarts, flushes and failovers, as long as the "
        "servers' clocks do not step back.",
    )
    yield _order(facts)
    yield _restart(facts)
    yield _eviction(facts)
    yield _outage(facts)
    yield _clock(facts)


def _semaphores(facts: Facts) -> Guarantee:
    if facts.topology is not Topology.QUORUM:
        text = "At most as many valid permits as the limit that all clients use"
        if facts.reach != "network":
            return Guarantee("semaphores", Verdict.YES, f"{text}.")
        return Guarantee("semaphores", Verdict.IF, f"{text}, as long as the server keeps its data.")
    text = (
        "A quorum has none. With three servers and a limit of two, three clients could each have two votes, while "
        "every server has granted only two permits."
    )
    return Guarantee("semaphores", Verdict.NO, text)


def _order(facts: Facts) -> Guarantee:
    if not facts.queue:
        return Guarantee(
            "order", Verdict.NO, "Waiters may be overtaken; a writer waits for as long as others keep reading."
        )
    text = "Waiters are served first come, first served, and woken by a notification"
    if facts.topology is Topology.SINGLE and not facts.acknowledged:
        text += (
            "; threads and tasks of one connection may hand the lock to each other for 50 ms first (unless "
            "local_handoff=False)"
        )
    return Guarantee("order", Verdict.YES, f"{text}.")


def _restart(facts: Facts) -> Guarantee:
    forgets_all = (
        "A restarted server has forgotten all locks. Other clients can acquire them while their holders continue until "
        "their next renewal. Turn on appendonly, or check fences."
    )
    verdict, text = {
        None: (Verdict.UNKNOWN, "This account may not read it (CONFIG GET save, appendfsync)."),
        Persistence.NONE: (Verdict.DANGER, forgets_all),
        Persistence.SNAPSHOTS: (Verdict.NO, "A restarted server has forgotten the grants since the last snapshot."),
        Persistence.LOG: (Verdict.IF, "A restarted server may have forgotten the grants of its last seconds."),
    }.get(facts.persistence, (Verdict.YES, "A restarted server remembers every grant."))
    return Guarantee("restart", verdict, f"Persistence: {_kept(facts.persistence)}. {text}")


def _kept(persistence: Persistence | None) -> str:
    return "unknown" if persistence is None else persistence.value


def _eviction(facts: Facts) -> Guarantee:
    if facts.eviction is None:
        return Guarantee("eviction", Verdict.UNKNOWN, "The server does not reveal its maxmemory-policy.")
    if facts.eviction == "noeviction":
        return Guarantee("eviction", Verdict.YES, "No lock is evicted when memory is full (noeviction).")
    if facts.memory_limit == 0:
        text = f"The policy {facts.eviction} evicts locks once a memory limit is set; there is none now."
        return Guarantee("eviction", Verdict.IF, text)
    text = f"The policy {facts.eviction} evicts held locks when memory is full. Set maxmemory-policy noeviction."
    return Guarantee("eviction", Verdict.DANGER, text)


def _outage(facts: Facts) -> Guarantee:
    if not facts.replicas and facts.topology is Topology.SINGLE:
        known = "No replica is connected" if facts.replicas == 0 else "The number of replicas is unknown"
        text = f"{known}: while the server is down, no lock is granted and leases are lost at their deadlines."
        return Guarantee("outage", Verdict.NO if facts.replicas == 0 else Verdict.UNKNOWN, text)
    count = "an unknown number of" if facts.replicas is None else str(facts.replicas)
    if facts.acknowledged:
        text = (
            f"A grant counts only after {facts.acknowledged} of {count} replicas acknowledged it. If a replica "
            "without it is promoted, the lock is forgotten. Its holder notices at the next renewal; fences continue."
        )
        return Guarantee("outage", Verdict.IF, text)
    text = (
        f"A promoted replica (one of {count}) may lack the latest grants: then two clients may hold a lock until the "
        "first notices at its next renewal. Set replicas=, use a quorum, or check fences."
    )
    return Guarantee("outage", Verdict.NO, text)


def _clock(facts: Facts) -> Guarantee:
    offset = facts.clock_offset
    if offset is None:
        return Guarantee("clock", Verdict.UNKNOWN, "The server does not reveal its time.")
    if abs(offset) < SAME_CLOCK:
        return Guarantee("clock", Verdict.YES, "The server's clock agrees with ours; only a step could do harm.")
    where = "ahead of" if offset > 0 else "behind"
    text = (
        f"The server's clock is {abs(offset):.0f} s {where} ours. Only its rate matters for locks. If it is corrected "
        "by a step, locks end early or late by that much, and a step back may repeat fences."
    )
    return Guarantee("clock", Verdict.IF, text)


def _quorum(facts: Facts) -> Iterator[Guarantee]:
    """A majority of independent servers."""
    count = len(facts.nodes)
    max_down = (count - 1) // 2
    yield Guarantee(
        "one holder",
        Verdict.IF,
        f"At most one valid lease per name, as long as fewer than {count - max_down} of the {count} servers lack it "
        "and their clock rates are right. A server lacks a lease if it was unreachable at the grant or has forgotten "
        f"it since: after a grant with {max_down} unreachable, a single server that forgets lets a second holder in.",
    )
    yield Guarantee("fences", Verdict.IF, "Strictly increase across majorities, under the same condition.")
    yield _order(facts)
    silent = sum(node.silent is not None for node in facts.nodes)
    text = f"Works with up to {max_down} of {count} servers down; {silent} did not answer just now."
    verdict = Verdict.DANGER if silent > max_down else Verdict.YES if max_down else Verdict.NO
    yield Guarantee("outage", verdict, text)
    yield _quorum_restart(facts, max_down)
    yield _quorum_eviction(facts)


def _quorum_restart(facts: Facts, max_down: int) -> Guarantee:
    forgetful = sum(node.persistence is not Persistence.LOG_ALWAYS for node in facts.nodes if node.silent is None)
    if not forgetful:
        return Guarantee("restart", Verdict.YES, "Every server that answered remembers each grant after a restart.")
    text = f"{forgetful} of {len(facts.nodes)} servers may forget grants when they restart"
    if facts.sits_out:
        text += f"; a restarted server does not vote for {facts.sits_out:g} s, so leases up to that ttl are safe."
        return Guarantee("restart", Verdict.IF, text)
    text += ". Set sits_out to the longest ttl in use, so that a restarted server does not vote for that long."
    return Guarantee("restart", Verdict.DANGER if forgetful > max_down else Verdict.NO, text)


def _quorum_eviction(facts: Facts) -> Guarantee:
    """Report the worst eviction policy among the servers."""
    lines = [_eviction(node) for node in facts.nodes if node.silent is None]
    for verdict in (Verdict.DANGER, Verdict.UNKNOWN, Verdict.IF):
        alike = [line for line in lines if line.verdict is verdict]
        if alike:
            return Guarantee("eviction", verdict, f"On {len(alike)} of {len(facts.nodes)} servers: {alike[0].text}")
    return Guarantee("eviction", Verdict.YES, "No server that answered evicts locks.")
