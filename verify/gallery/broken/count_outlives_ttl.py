"""A re-entrant lock whose local count says "held" when the key has long gone."""

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
    for _ in range(2):  # the second time from inside the first
        sent_at = me.now()
        await lock.lock()
        me.enters(until=sent_at + TTL)
        await me.work()
    me.leaves()


EXHIBIT = exhibit(
    "A local count that outlives the ttl",
    row="D4",
    breaks="ME",
    wrong="A's ttl runs out while its count is 1, and B takes the lock. A enters once more: the count says that it "
    "holds the lock, so nobody asks the store.",
    cure="The count belongs to the lease and ends with it: entering again checks the lease's own deadline.",
    clients={"A": worker, "B": worker},
    code=[Reentrant, worker],
    seconds=4.5,
)
