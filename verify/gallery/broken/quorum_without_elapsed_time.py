"""Asking many servers takes time, which the first of them has been counting."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit

SERVERS = 3
ENOUGH = SERVERS // 2 + 1


async def lock(me: Process) -> None:
    votes = 0
    for server in range(SERVERS) if me.name == "A" else reversed(range(SERVERS)):
        votes += await me.command("SET", "door", me.name, "NX", "PX", TTL_MS, server=server) is not None
        if votes >= ENOUGH:
            me.enters(until=me.now() + TTL)
            await me.work()
            me.leaves()
            return


async def patient(me: Process) -> None:
    await me.sleep(1)
    await me.work()
    await lock(me)


EXHIBIT = exhibit(
    "A quorum without the elapsed-time check",
    breaks="ME",
    wrong="A's second vote comes a second after its first. A counts from the second; the first server has given "
    "its vote away again before A thinks that its lease ends.",
    cure="A lease on a majority counts from before the *first* request, and is worth nothing if little is left of it.",
    clients={"A": lock, "B": patient},
    code=[lock],
    servers=SERVERS,
    seconds=3.5,
    slow=1,
)
