"""SETEX overwrites the key of another holder."""

from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    await me.command("SETEX", "door", TTL, me.name)
    me.enter()
    await me.work()
    me.leave()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "SETEX overwrites",
    row="A4",
    breaks="ME",
    failure="SETEX always succeeds. So the second client also becomes the holder, and the first never notices.",
    fix="Acquire with one command that can fail: `SET key id NX PX ttl`.",
    clients={"A": lock, "B": lock},
    code=[lock],
)
