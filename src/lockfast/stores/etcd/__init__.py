"""The etcd store: locks on etcd 3.4 or later, over its HTTP interface.

It keeps the rules of `ports.Store`: one holder, always a ttl, growing fences, operations idempotent by holder id, first
come, first served, with a hand-off in the transaction that releases. Differences to the other stores:

- etcd counts a ttl in whole seconds, and at least about two. A crashed holder's lock is free up to two seconds late.
- etcd does not detect a dead waiter. A crashed waiter may be granted the lock, which then lasts for its ttl. A waiter
  that did not refresh its ticket for its whole ttl loses it.
- A waiter that becomes first in the queue is not notified.
- A free lock has no fence to show: fences are etcd's revision, which grows independently.
"""
