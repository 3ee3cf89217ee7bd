"""Requests to many servers take time, and the first server counts it."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit

SERVERS = 3
ENOUGH = SERVERS // 2 + 1


async def lock(me: Process) -> None:
    votes = 0
    for server in range(SERVERS) if me.name == "A" else reversed(range(SERVERS)):
        votes += await me.command("SET", "door", me.name, "NX", "PX", TTL_MS, server=server) is not None
        if votes >= ENOUGH:
            me.enter(until=me.now() + TTL)
            await me.work()
            me.leave()
            return


async def patient(me: Process) -> None:
    await me.sleep(1)
    await me.work()
    await lock(me)


EXHIBIT = exhibit(
    "A quorum without the elapsed-time check",
    breaks="ME",
    failure="A's second vote arrives a second after its first. A counts from the second; the first server gives its "
    "vote to B before A's lease ends by A's clock.",
    fix="Count a majority's lease from before the *first* request, and reject it if too little of it is left.",
    clients={"A": lock, "B": patient},
    code=[lock],
    servers=SERVERS,
    seconds=3.5,
    slow=1,
)
