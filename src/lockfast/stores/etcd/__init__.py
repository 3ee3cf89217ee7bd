"""The etcd store: the same locks on etcd 3.4 or later, over its HTTP interface.

What is the same: one holder, always a ttl, fences that grow, every operation idempotent by holder, first come, first
served with the lock handed on in one transaction. What differs: etcd counts a ttl in whole seconds and not below two or
so, so a crashed holder's lock is free up to two seconds later than its ttl; nobody can tell etcd that a waiter is dead,
so one that crashed may be handed the lock, which then lasts its ttl; a waiter that was silent for its whole ttl loses
its place; who becomes the first in the queue is not told so; and the fence of a lock that nobody holds is not shown,
since it is etcd's own revision, which goes on by itself.
"""
