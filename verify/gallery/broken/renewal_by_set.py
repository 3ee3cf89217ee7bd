"""A renewal that overwrites the key."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
        sent_at = me.now()
    me.enter(until=sent_at + TTL)
    await me.work()
    sent_at = me.now()
    if await me.command("SET", "door", me.name, "XX", "PX", TTL_MS):
        me.enter(until=sent_at + TTL)
    await me.work()
    me.leave()


EXHIBIT = exhibit(
    "Renewal by SET",
    breaks="OW",
    failure="A's renewal is late, and B holds the lock. `SET … XX` only requires that the key exists, and replaces "
    "B's id by A's.",
    fix="Renew only if the value is still your own id, in one step, and change only the ttl.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
)
