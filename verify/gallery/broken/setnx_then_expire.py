"""SETNX and EXPIRE are two commands; a client can crash between them."""

from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SETNX", "door", me.name):
        await me.sleep(1)
    await me.command("EXPIRE", "door", TTL)
    me.enter()
    await me.work()
    me.leave()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "SETNX, then EXPIRE",
    row="A5",
    breaks="ST",
    failure="The client crashes between the two commands. The key has no ttl yet, so the lock stays held for ever.",
    fix="Set value and ttl in one command: `SET key id NX PX ttl`.",
    clients={"A": lock, "B": lock},
    code=[lock],
    crash=1,
    mortal="A",
)
