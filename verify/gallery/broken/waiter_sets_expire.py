"""A waiter that repairs a missing ttl extends every holder's ttl."""

from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SETNX", "door", me.name):
        await me.command("EXPIRE", "door", TTL)  # in case the holder crashed before its EXPIRE
        await me.sleep(1)
    await me.command("EXPIRE", "door", TTL)
    me.enter(until=me.now() + TTL)
    await me.work()
    me.leave()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "A waiter sets EXPIRE on the holder's key",
    row="E5",
    breaks="OW",
    failure="Every attempt of B extends A's lock. If A crashes, its waiters keep the lock alive for ever.",
    fix="Set the ttl together with the value; only the holder may extend it.",
    clients={"A": lock, "B": lock},
    code=[lock],
    crash=1,
    mortal="A",
)
