"""A renewal that extends the key of any holder."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
        sent_at = me.now()
    me.enter(until=sent_at + TTL)
    await me.work()
    sent_at = me.now()
    if await me.command("PEXPIRE", "door", TTL_MS):
        me.enter(until=sent_at + TTL)
    await me.work()
    me.leave()


EXHIBIT = exhibit(
    "Renewal without an owner check",
    breaks="ME",
    failure="A's renewal is late: its ttl has expired, and B holds the lock. PEXPIRE extends B's key and returns 1, "
    "so A believes that it extended its own lease.",
    fix="Renew only if the value is still your own id, in one step.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
)
