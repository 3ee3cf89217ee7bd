"""From a way to dial to a store: which wire, which inbox, with or without acknowledgements."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from lockfast.facts import Topology
from lockfast.ports import Runtime, Store
from lockfast.stores.redis.options import Choices
from lockfast.stores.redis.store import RedisStore
from lockfast.stores.redis.transport.connect import ConnectionFactory

LONGEST = 1.0
"""Seconds for which a request may go unanswered where another server may take over: it is repeated, since the same
request twice changes nothing."""


class Builder(NamedTuple):
    """What all stores of one connection have in common."""

    runtime: Runtime
    flavour: str
    choices: Choices

    def connections(
        self, dial: ConnectionFactory, *, longest: float = math.inf, sharded: bool = False
    ) -> tuple[Any, Any]:
        """A wire and an inbox of the colour; nothing is dialled yet."""
        if self.flavour == "threads":
            from lockfast.stores.redis.transport.thread_inbox import ThreadInbox
            from lockfast.stores.redis.transport.threads import ThreadWire

            return ThreadWire(dial, self.runtime, longest), ThreadInbox(dial, self.runtime, longest, sharded)
        from lockfast.stores.redis.transport.task_inbox import TaskInbox
        from lockfast.stores.redis.transport.tasks import TaskWire

        return TaskWire(dial, self.runtime, longest), TaskInbox(dial, self.runtime, longest, sharded)

    def store(self, wire: Any, inbox: Any, topology: Topology) -> RedisStore:
        """The store on these connections, as it was chosen."""
        reasserts = self.choices.reassert
        setup: dict[str, Any] = {
            "topology": topology,
            "reasserts": topology is not Topology.SINGLE if reasserts is None else reasserts,
        }
        if self.choices.wanted is None:
            return RedisStore(wire, inbox, **setup)
        from lockfast.stores.redis.topology.replicas import ConfirmingStore

        return ConfirmingStore(wire, inbox, self.runtime, self.choices.wanted, **setup)

    def with_or_without_scripts(self, wire: Any, inbox: Any, topology: Topology) -> Store:
        """The same, or the one without scripts where that was chosen or turns out to be needed."""
        scripted = self.store(wire, inbox, topology)
        if self.choices.scripts or self.choices.wanted is not None:
            return scripted
        from lockfast.stores.redis.fallback.script_fallback import ChoosingStore

        def without() -> RedisStore:
            from lockfast.stores.redis.fallback.store import TransactionStore

            return TransactionStore(wire, self.runtime, topology=topology)

        return ChoosingStore(scripted, without, self.runtime) if self.choices.scripts is None else without()

    @property
    def longest(self) -> float:
        """`LONGEST`, and what a wait for replicas may add, which holds up the requests behind it."""
        wanted = self.choices.wanted
        return LONGEST if wanted is None else LONGEST + min(1.0, wanted.within)
