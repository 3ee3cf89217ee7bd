"""Facts about the engine behind a store. `client/guarantees.py` derives the guarantees from them.

Rules: an unknown fact is None, never a guess. No fact contains a password or an address. Text from a server is cleaned
before it gets here.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Persistence(enum.Enum):
    """What an engine remembers after a sudden stop, such as a power cut.

    >>> Persistence.NONE.value
    'nothing'
    """

    NONE = "nothing"
    SNAPSHOTS = "snapshots, taken now and then"
    LOG = "a log, flushed about once a second"
    LOG_ALWAYS = "a log, flushed before each answer"
    FILE = "a file, written before each answer"


class Topology(enum.Enum):
    """The kind of servers behind a connection.

    >>> Topology.QUORUM.value
    'a quorum of independent servers'
    """

    SINGLE = "one server"
    SENTINEL = "one master, watched by sentinels"
    CLUSTER = "a cluster"
    QUORUM = "a quorum of independent servers"


class Facts(NamedTuple):
    """Known facts about the engine behind a connection; None where the engine does not reveal one.

    `reach`: the range of its locks: a "process", a "host" or the "network". `eviction`: the policy that drops keys when
    `memory_limit` bytes are used (0: no limit). `acknowledged`: how many of the `replicas` must confirm a grant before
    it counts. `clock`: the server's wall clock, in seconds since 1970; `clock_offset`: how far it is ahead of ours.
    `identity`: id of the running server, to recognise one that is listed twice. `queue`: waiters are served in order.
    `nodes`: the facts of each server of a quorum. `sits_out`: seconds for which a restarted one does not vote.
    `silent`: why one did not answer.

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
        """Describe the engine in a few words.

        >>> Facts("valkey", version="9.1.2", role="master").shown
        'valkey 9.1.2, master'
        """
        if self.silent is not None:
            return f"{self.engine}, which did not answer: {self.silent}"
        if self.nodes:
            return f"{self.engine} of {len(self.nodes)}"
        text = self.engine if self.version is None else f"{self.engine} {self.version}"
        return text if self.role is None else f"{text}, {self.role}"
