"""A re-entrant lock by a local count, whose last unlock forgets the key."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


class Reentrant:
    def __init__(self, me: Process) -> None:
        self.me = me
        self.count = 0

    async def lock(self) -> None:
        while self.count == 0 and not await self.me.command("SET", "door", self.me.name, "NX", "PX", TTL_MS):
            await self.me.sleep(1)
        self.count += 1

    async def unlock(self) -> None:
        self.count -= 1
        if self.count > 0:
            await self.me.command("DEL", "door")


async def worker(me: Process) -> None:
    lock = Reentrant(me)
    sent_at = me.now()
    await lock.lock()
    me.enters(until=sent_at + TTL)
    await me.work()
    me.leaves()
    await lock.unlock()


EXHIBIT = exhibit(
    "The last unlock never deletes",
    row="D4",
    breaks="CL",
    wrong="The test is the wrong way round: the last unlock counts down to 0 and leaves the key. A is done, and the "
    "others wait for its whole ttl.",
    cure="When the count comes to 0, release in the store, and test that the key is gone.",
    clients={"A": worker, "B": worker},
    code=[Reentrant, worker],
    seconds=2.0,
)
