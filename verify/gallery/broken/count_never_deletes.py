"""A reentrant lock with a local count whose last unlock does not delete the key."""

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
    me.enter(until=sent_at + TTL)
    await me.work()
    me.leave()
    await lock.unlock()


EXHIBIT = exhibit(
    "The last unlock never deletes",
    row="D4",
    breaks="CL",
    failure="The condition is reversed: the last unlock decrements the count to 0 and leaves the key. A has "
    "finished, and the other clients wait for its whole ttl.",
    fix="Release in the store when the count reaches 0, and test that the key is gone.",
    clients={"A": worker, "B": worker},
    code=[Reentrant, worker],
    seconds=2.0,
)
