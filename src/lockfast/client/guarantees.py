"""`locks.guarantees()`: what a connection promises and what not, drawn from what its store found out.

Rules kept here: what is not promised is said as plainly as what is; what could not be found out is called unknown and
never taken for good; each line has a verdict, so that a program can act on it; a danger is logged, once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from lockfast.facts import Facts, Persistence, Topology

SAME_CLOCK = 1.0
"""Seconds by which a server's clock may differ from ours without being worth a word."""


class Verdict(enum.Enum):
    """What a line of the guarantees comes to.

    >>> Verdict.DANGER.value
    'danger'
    """

    YES = "yes"
    IF = "if"
    NO = "no"
    UNKNOWN = "unknown"
    DANGER = "danger"


class Guarantee(NamedTuple):
    """One line: what it is about, the verdict, and a sentence that says it."""

    topic: str
    verdict: Verdict
    text: str

    def __str__(self) -> str:
        from textwrap import wrap

        lines = wrap(self.text, 88)
        return f"{self.topic:<12}{self.verdict.value:<9}" + ("\n" + " " * 21).join(lines)


class Guarantees(NamedTuple):
    """What a connection promises and what not; `print` it, or ask it.

    >>> import lockfast
    >>> found = lockfast.connect("memory://").guarantees()
    >>> found.about("order").verdict.value, found.dangers
    ('yes', ())
    """

    facts: Facts
    lines: tuple[Guarantee, ...]

    @property
    def dangers(self) -> tuple[Guarantee, ...]:
        """The lines that somebody should do something about."""
        return tuple(line for line in self.lines if line.verdict is Verdict.DANGER)

    def about(self, topic: str) -> Guarantee:
        """The line about `topic`; `KeyError` when there is none."""
        return {line.topic: line for line in self.lines}[topic]

    def __str__(self) -> str:
        return "\n".join([f"Locks on {self.facts.shown} ({self.facts.topology.value}):", *map(str, self.lines)])


def guarantees_of(facts: Facts) -> Guarantees:
    """The conclusions from `facts`.

    >>> print(guarantees_of(Facts("valkey", eviction="allkeys-lru", memory_limit=100)).dangers[0].topic)
    eviction
    """
    rules = _quorum if facts.topology is Topology.QUORUM else _server if facts.reach == "network" else _local
    return Guarantees(facts, (*rules(facts), _stopped()))


def _stopped() -> Guarantee:
    return Guarantee(
        "stopped",
        Verdict.NO,
        "A holder that is stopped past its deadline (a pause, a suspended machine) may write once more when it runs "
        "again. Only a resource that checks the fence keeps it out.",
    )


def _local(facts: Facts) -> Iterator[Guarantee]:
    """One process, or one host: those who could hold a lock end with what keeps it."""
    yield Guarantee("one holder", Verdict.YES, f"At most one valid lease per name, within this {facts.reach}.")
    yield Guarantee("fences", Verdict.YES, "Strictly increase in the order of the grants.")
    yield _order(facts)
    kept = "all holders end with it." if facts.reach == "process" else "fences go on; a reboot voids all grants."
    yield Guarantee("restart", Verdict.YES, f"What is kept: {_kept(facts.persistence)}; {kept}")
    yield Guarantee("reach", Verdict.NO, f"Nobody outside this {facts.reach} is kept out.")


def _server(facts: Facts) -> Iterator[Guarantee]:
    """One master, whatever stands beside it."""
    yield _role(facts)
    yield Guarantee(
        "fences",
        Verdict.IF,
        "Strictly increase in the order of the grants, also over restarts, flushes and failovers, while the clocks of "
        "the servers do not step back.",
    )
    yield _order(facts)
    yield from _memory(facts)
    yield _outage(facts)
    yield _clock(facts)


def _role(facts: Facts) -> Guarantee:
    if facts.role == "replica":
        text = "This server is a replica: no lock can be taken here. Connect to its master."
        return Guarantee("one holder", Verdict.DANGER, text)
    text = (
        "At most one valid lease per name, as long as the server keeps its data and its clock runs at the right rate."
    )
    return Guarantee("one holder", Verdict.IF, text)


def _order(facts: Facts) -> Guarantee:
    if facts.queue:
        text = "Who waits is served first come, first served, and woken by a message"
        if facts.topology is Topology.SINGLE and not facts.acknowledged:
            text += (
                "; threads and tasks of one connection may pass the lock on among themselves for 50 ms first (not with "
                "passing=False)"
            )
        return Guarantee("order", Verdict.YES, f"{text}.")
    return Guarantee("order", Verdict.NO, "Who waits may be overtaken.")


_NOTHING_KEPT = (
    "A restarted server has forgotten all locks, and others can take them while their holders go on until their next "
    "renewal. Turn on appendonly, or check fences."
)


def _memory(facts: Facts) -> Iterator[Guarantee]:
    """What a server may forget: by a restart, or for want of memory."""
    verdict, text = {
        None: (Verdict.UNKNOWN, "This account may not read it (CONFIG GET save, appendfsync)."),
        Persistence.NONE: (Verdict.DANGER, _NOTHING_KEPT),
        Persistence.SNAPSHOTS: (Verdict.NO, "A restarted server has forgotten what was granted since the last one."),
        Persistence.LOG: (Verdict.IF, "A restarted server may have forgotten the last seconds before it stopped."),
    }.get(facts.persistence, (Verdict.YES, "A restarted server remembers every lock that it granted."))
    yield Guarantee("restart", verdict, f"What is kept: {_kept(facts.persistence)}. {text}")
    yield _eviction(facts)


def _kept(persistence: Persistence | None) -> str:
    return "unknown" if persistence is None else persistence.value


def _eviction(facts: Facts) -> Guarantee:
    if facts.eviction is None:
        return Guarantee("eviction", Verdict.UNKNOWN, "The server does not tell its maxmemory-policy.")
    if facts.eviction == "noeviction":
        return Guarantee("eviction", Verdict.YES, "No lock is thrown away for want of memory (noeviction).")
    if facts.memory_limit == 0:
        text = f"The policy {facts.eviction} throws locks away once a memory limit is set; there is none now."
        return Guarantee("eviction", Verdict.IF, text)
    text = f"The policy {facts.eviction} throws held locks away when memory is full. Set maxmemory-policy noeviction."
    return Guarantee("eviction", Verdict.DANGER, text)


def _outage(facts: Facts) -> Guarantee:
    if not facts.replicas and facts.topology is Topology.SINGLE:
        known = "No replica is connected" if facts.replicas == 0 else "It is unknown whether there are replicas"
        text = f"{known}: while the server is down nobody gets a lock, and leases are lost at their deadlines."
        return Guarantee("outage", Verdict.NO if facts.replicas == 0 else Verdict.UNKNOWN, text)
    count = "an unknown number of" if facts.replicas is None else str(facts.replicas)
    if facts.acknowledged:
        text = (
            f"A grant counts only when {facts.acknowledged} of {count} replicas confirmed it; should another one take "
            "over, the lock is forgotten all the same. The holder is told, and fences go on."
        )
        return Guarantee("outage", Verdict.IF, text)
    text = (
        f"One of {count} replicas may take over without the latest grants: then two may hold a lock until the first "
        "is told at its next renewal. Ask for acknowledgement, use a quorum, or check fences."
    )
    return Guarantee("outage", Verdict.NO, text)


def _clock(facts: Facts) -> Guarantee:
    offset = facts.clock_offset
    if offset is None:
        return Guarantee("clock", Verdict.UNKNOWN, "The server does not tell its time.")
    if abs(offset) < SAME_CLOCK:
        return Guarantee("clock", Verdict.YES, "The server's clock agrees with ours; only its steps could do harm.")
    where = "ahead of" if offset > 0 else "behind"
    text = (
        f"The server's clock is {abs(offset):.0f} s {where} ours. Locks count by its rate alone; but if it is set "
        "right by a step, locks end early or late by as much, and a step back may repeat fences."
    )
    return Guarantee("clock", Verdict.IF, text)


def _quorum(facts: Facts) -> Iterator[Guarantee]:
    """A majority of independent servers."""
    count = len(facts.nodes)
    most_down = (count - 1) // 2
    yield Guarantee(
        "one holder",
        Verdict.IF,
        f"At most one valid lease per name, as long as no more than {most_down} of {count} servers forget at a time, "
        "and their clocks run at the right rate.",
    )
    yield Guarantee("fences", Verdict.IF, "Strictly increase across majorities, under the same condition.")
    yield _order(facts)
    silent = sum(node.silent is not None for node in facts.nodes)
    text = f"Works with up to {most_down} of {count} servers down; {silent} did not answer just now."
    verdict = Verdict.DANGER if silent > most_down else Verdict.YES if most_down else Verdict.NO
    yield Guarantee("outage", verdict, text)
    yield _forgetful(facts)
    yield _evicting(facts)


def _forgetful(facts: Facts) -> Guarantee:
    """What restarts do to a majority."""
    count = len(facts.nodes)
    forget = sum(node.persistence is not Persistence.LOG_ALWAYS for node in facts.nodes if node.silent is None)
    if not forget:
        return Guarantee("restart", Verdict.YES, "Every server that answered remembers each grant over a restart.")
    text = f"{forget} of {count} servers may forget grants when they restart"
    if facts.sits_out:
        text += f"; one that restarted is not counted for {facts.sits_out:g} s, so leases of up to that ttl are safe."
        return Guarantee("restart", Verdict.IF, text)
    text += ". Set sits_out to the longest ttl in use, so that one that restarted is not counted for that long."
    return Guarantee("restart", Verdict.DANGER if forget > (count - 1) // 2 else Verdict.NO, text)


def _evicting(facts: Facts) -> Guarantee:
    """The worst of what the nodes' policies do."""
    lines = [_eviction(node) for node in facts.nodes if node.silent is None]
    for verdict in (Verdict.DANGER, Verdict.UNKNOWN, Verdict.IF):
        alike = [line for line in lines if line.verdict is verdict]
        if alike:
            return Guarantee("eviction", verdict, f"On {len(alike)} of {len(facts.nodes)} servers: {alike[0].text}")
    return Guarantee("eviction", Verdict.YES, "No server that answered throws locks away for want of memory.")
