"""The ZooKeeper store: locks on ZooKeeper 3.5 or later, through kazoo.

It keeps the rules of `ports.Store`: one holder, always a ttl, growing fences, operations idempotent by holder id, first
come, first served, with a hand-off in the transaction that releases. It uses no ephemeral nodes: they end with the
session, and a session can end before a lease does, so a holder with a short network failure would lose its lock. A
grant is a persistent node; its ttl starts at its last change, by ZooKeeper's clock. Differences to the other stores:

- ZooKeeper does not detect a dead waiter. A crashed waiter may be granted the lock, which then lasts for its ttl. A
  waiter that did not refresh its ticket for its whole ttl loses it.
- A waiter that becomes first in the queue is not notified.
- A free lock has no fence to show.
- The nodes of a crashed holder stay, as a free lock, until the name is used again.
"""
