"""SETEX sets the key whoever has it."""

from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    await me.command("SETEX", "door", TTL, me.name)
    me.enters()
    await me.work()
    me.leaves()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "SETEX overwrites",
    row="A4",
    breaks="ME",
    wrong="SETEX always succeeds, so the second client takes itself for the holder as well, and the first "
    "never learns.",
    cure="Take with one command that refuses: `SET key id NX PX ttl`.",
    clients={"A": lock, "B": lock},
    code=[lock],
)
