"""The ZooKeeper store: the same locks on ZooKeeper 3.5 or later; kazoo carries the requests.

What is the same: one holder, always a ttl, fences that grow, every operation idempotent by holder, first come, first
served with the lock handed on in one transaction. No ephemeral nodes are used: they end with a session, and a session
may end before a lease does, so a holder that was cut off for a while could be robbed. A grant is a plain node whose
last change, by ZooKeeper's own clock, is the beginning of its ttl.

What differs: nobody can tell that a waiter is dead, so one that crashed may be handed the lock, which then lasts its
ttl; a waiter that was silent for its whole ttl loses its place; who becomes the first is not told so; the fence of a
lock that nobody holds is not shown; and what a crashed holder left lies there, free, until its name is used again.
"""
