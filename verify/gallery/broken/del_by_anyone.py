"""The clean-up deletes the key even if the client did not acquire the lock."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    for _ in range(2):
        sent_at = me.now()
        if await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
            me.enter(until=sent_at + TTL)
            await me.work()
            me.leave()
        await me.command("DEL", "door")  # even if not acquired


EXHIBIT = exhibit(
    "DEL by anyone",
    row="B2",
    breaks="ME",
    failure="B does not acquire the lock, but its clean-up deletes the key anyway: A's key. B's next attempt succeeds.",
    fix="Delete only your own key: compare the holder id and delete in one step.",
    clients={"A": lock, "B": lock},
    code=[lock],
)
