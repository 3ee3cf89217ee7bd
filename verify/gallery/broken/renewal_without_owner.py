"""A renewal that prolongs the key, whoever's it is."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
        sent_at = me.now()
    me.enters(until=sent_at + TTL)
    await me.work()
    sent_at = me.now()
    if await me.command("PEXPIRE", "door", TTL_MS):
        me.enters(until=sent_at + TTL)
    await me.work()
    me.leaves()


EXHIBIT = exhibit(
    "Renewal without an owner check",
    breaks="ME",
    wrong="A comes late with its renewal. Its ttl has run out and B holds the lock. PEXPIRE prolongs B's key "
    "and says 1, which A takes for its own lease.",
    cure="Renew only if the value is still your own id, in one step.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
)
