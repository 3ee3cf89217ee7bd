"""Look, then take: two commands, and another client looks in between."""

from verify.gallery.exhibit import TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    while await me.command("GET", "door"):
        await me.sleep(1)
    await me.command("SET", "door", me.name, "PX", TTL_MS)
    me.enters()
    await me.work()
    me.leaves()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "GET, then SET",
    row="C2",
    breaks="ME",
    wrong="Both clients see a free lock before either has written, and both write.",
    cure="Test and set in one step on the server: `NX`, or a script.",
    clients={"A": lock, "B": lock},
    code=[lock],
)
