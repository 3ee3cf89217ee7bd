"""The owner check and the delete are two commands."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
        sent_at = me.now()
    me.enter(until=sent_at + TTL)
    await me.work()
    me.leave()
    if await me.command("GET", "door") == me.name.encode():
        await me.command("DEL", "door")


EXHIBIT = exhibit(
    "Compare, then DEL",
    breaks="OW",
    failure="The key is A's when A reads it. Before A's DEL arrives, the ttl expires and B acquires the lock. The "
    "DEL deletes B's key.",
    fix="Compare and delete in one step on the server: a script, or `DELIFEQ` where the server has it.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
    slow=1,
)
