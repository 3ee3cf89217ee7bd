"""The holder's clock starts at the reply; the server's clock started earlier."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
    me.enter(until=me.now() + TTL)
    await me.work()
    me.leave()


EXHIBIT = exhibit(
    "Validity counted from the reply",
    breaks="ME",
    failure="The reply takes a second. A counts its 3 s from the reply; the server counted them from the request, "
    "and grants the lock to B a second before A's lease ends by its own clock.",
    fix="Count from the moment before the request is sent. That is never too late.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
    slow=1,
)
