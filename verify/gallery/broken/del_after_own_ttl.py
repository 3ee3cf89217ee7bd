"""The holder exceeds its ttl and deletes a key that belongs to another client by now."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
        sent_at = me.now()
    me.enter(until=sent_at + TTL)
    await me.work()
    me.leave()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "DEL after the ttl has expired",
    row="C3",
    breaks="ME",
    failure="A works longer than its ttl, and B acquires the lock, as it should. Then A finishes and deletes the "
    "key, which is B's. C enters while B still works.",
    fix="Delete only if the value is still your own id, in one step. Use a fence to reject late writes of a holder "
    "whose lease expired.",
    clients={"A": lock, "B": lock, "C": lock},
    code=[lock],
    seconds=4.5,
)
