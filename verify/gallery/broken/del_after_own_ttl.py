"""The holder overran its ttl, and deletes what by now is another's."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
        sent_at = me.now()
    me.enters(until=sent_at + TTL)
    await me.work()
    me.leaves()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "DEL after one's own ttl has run out",
    row="C3",
    breaks="ME",
    wrong="A works longer than its ttl. B gets the lock, as it should. Then A is done and deletes the key, which is "
    "B's, and C comes in beside B.",
    cure="Delete only if the value is still your own id, in one step; and a fence for what an overrun holder writes.",
    clients={"A": lock, "B": lock, "C": lock},
    code=[lock],
    seconds=4.5,
)
