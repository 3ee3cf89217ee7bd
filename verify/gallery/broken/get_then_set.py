"""GET and SET are two commands; another client can check between them."""

from verify.gallery.exhibit import TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    while await me.command("GET", "door"):
        await me.sleep(1)
    await me.command("SET", "door", me.name, "PX", TTL_MS)
    me.enter()
    await me.work()
    me.leave()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "GET, then SET",
    row="C2",
    breaks="ME",
    failure="Both clients find the lock free before either has written, and both write.",
    fix="Check and set in one step on the server: `NX` or a script.",
    clients={"A": lock, "B": lock},
    code=[lock],
)
