"""A waiter that mends a missing ttl mends everybody's."""

from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SETNX", "door", me.name):
        await me.command("EXPIRE", "door", TTL)  # in case its holder died before it could
        await me.sleep(1)
    await me.command("EXPIRE", "door", TTL)
    me.enters(until=me.now() + TTL)
    await me.work()
    me.leaves()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "A waiter EXPIREs what it finds",
    row="E5",
    breaks="OW",
    wrong="Every attempt of B prolongs A's lock. When A is dead, the waiters keep its lock alive for ever.",
    cure="The ttl is set together with the value, and only the holder may prolong it.",
    clients={"A": lock, "B": lock},
    code=[lock],
    crash=1,
    mortal="A",
)
