"""A clean-up that deletes the key whether or not the lock was got."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    for _ in range(2):
        sent_at = me.now()
        if await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
            me.enters(until=sent_at + TTL)
            await me.work()
            me.leaves()
        await me.command("DEL", "door")  # in any case


EXHIBIT = exhibit(
    "DEL by anyone",
    row="B2",
    breaks="ME",
    wrong="B does not get the lock, but its clean-up deletes the key all the same: A's. The next attempt succeeds.",
    cure="Delete only what is yours: compare the holder id and delete in one step.",
    clients={"A": lock, "B": lock},
    code=[lock],
)
