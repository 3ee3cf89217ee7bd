"""A renewal that writes the key anew."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
        sent_at = me.now()
    me.enters(until=sent_at + TTL)
    await me.work()
    sent_at = me.now()
    if await me.command("SET", "door", me.name, "XX", "PX", TTL_MS):
        me.enters(until=sent_at + TTL)
    await me.work()
    me.leaves()


EXHIBIT = exhibit(
    "Renewal by SET",
    breaks="OW",
    wrong="A comes late with its renewal, when B holds the lock. `SET … XX` only asks that there be a key, and writes "
    "A's name over B's.",
    cure="Renew only if the value is still your own id, in one step, and change nothing but the ttl.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
)
