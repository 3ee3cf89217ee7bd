"""A reentrant lock whose local count says "held" long after the key expired."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


class Reentrant:
    def __init__(self, me: Process) -> None:
        self.me = me
        self.count = 0

    async def lock(self) -> None:
        while self.count == 0 and not await self.me.command("SET", "door", self.me.name, "NX", "PX", TTL_MS):
            await self.me.sleep(1)
        self.count += 1


async def worker(me: Process) -> None:
    lock = Reentrant(me)
    for _ in range(2):  # the second time inside the first
        sent_at = me.now()
        await lock.lock()
        me.enter(until=sent_at + TTL)
        await me.work()
    me.leave()


EXHIBIT = exhibit(
    "A local count that outlives the ttl",
    row="D4",
    breaks="ME",
    failure="A's ttl expires while its count is 1, and B acquires the lock. A enters again: the count says that A "
    "holds the lock, so A sends no request.",
    fix="The count belongs to the lease and ends with it: entering again checks the deadline of the lease.",
    clients={"A": worker, "B": worker},
    code=[Reentrant, worker],
    seconds=4.5,
)
