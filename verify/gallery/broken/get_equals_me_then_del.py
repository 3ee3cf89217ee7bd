"""The owner check and the delete are two commands."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
        sent_at = me.now()
    me.enters(until=sent_at + TTL)
    await me.work()
    me.leaves()
    if await me.command("GET", "door") == me.name.encode():
        await me.command("DEL", "door")


EXHIBIT = exhibit(
    "GET equals me, then DEL",
    breaks="OW",
    wrong="The key is A's when A looks. Before A's DEL arrives, the ttl runs out and B takes the lock. The DEL removes "
    "B's.",
    cure="Compare and delete in one step on the server, by a script (or `DELIFEQ`, where there is one).",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
    slow=1,
)
