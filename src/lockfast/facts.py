"""What a store found out about its engine: plain facts, from which `guarantees.py` draws the conclusions.

Rules kept here: unknown is an answer (None), never a guess; no fact carries a password or an address; whatever text a
server chose is cleaned before it gets here.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Persistence(enum.Enum):
    """What an engine remembers after it was stopped at once, as by a power cut.

    >>> Persistence.NONE.value
    'nothing'
    """

    NONE = "nothing"
    SNAPSHOTS = "snapshots, taken now and then"
    LOG = "a log, flushed about once a second"
    LOG_ALWAYS = "a log, flushed before each answer"
    FILE = "a file, written before each answer"


class Topology(enum.Enum):
    """How many servers stand behind a connection, and how they belong together.

    >>> Topology.QUORUM.value
    'a quorum of independent servers'
    """

    SINGLE = "one server"
    SENTINEL = "one master, watched by sentinels"
    CLUSTER = "a cluster"
    QUORUM = "a quorum of independent servers"


class Facts(NamedTuple):
    """What is known of the engine behind a connection; None where it would not say.

    `reach` is how far its locks reach: a "process", a "host" or the "network". `eviction` is the policy by which it
    drops keys when `memory_limit` bytes are full (0: no limit). `acknowledged` is how many of its `replicas` confirm
    a grant before it counts. `clock` is its wall clock in seconds since 1970 when it was asked, `clock_offset` how
    far that was ahead of ours. `identity` marks the running server, so that one that was given twice is recognised.
    `queue` tells whether waiters are served in order. `sits_out` is for how many seconds a quorum does not count a
    node that restarted. `silent` says why nothing could be learnt of a node that did not answer.

    >>> Facts("valkey", version="9.1.2").role is None
    True
    """

    engine: str
    topology: Topology = Topology.SINGLE
    reach: str = "network"
    version: str | None = None
    role: str | None = None
    persistence: Persistence | None = None
    eviction: str | None = None
    memory_limit: int | None = None
    replicas: int | None = None
    acknowledged: int = 0
    clock: float | None = None
    clock_offset: float | None = None
    uptime: float | None = None
    identity: str | None = None
    queue: bool = True
    nodes: tuple[Facts, ...] = ()
    sits_out: float = 0.0
    silent: str | None = None

    @property
    def shown(self) -> str:
        """The engine in a few words.

        >>> Facts("valkey", version="9.1.2", role="master").shown
        'valkey 9.1.2, master'
        """
        if self.silent is not None:
            return f"{self.engine}, which did not answer: {self.silent}"
        if self.nodes:
            return f"{self.engine} of {len(self.nodes)}"
        text = self.engine if self.version is None else f"{self.engine} {self.version}"
        return text if self.role is None else f"{text}, {self.role}"
