"""A lock without a ttl is as mortal as its holder, and outlives it."""

from verify.gallery.exhibit import Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SET", "door", me.name, "NX"):
        await me.sleep(1)
    me.enters()
    await me.work()
    me.leaves()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "No longest hold",
    row="B3",
    breaks="ST",
    wrong="The holder dies. Nothing ever removes its key, and everybody else waits for ever.",
    cure="A lock has a ttl, always; a living holder renews it.",
    clients={"A": lock, "B": lock},
    code=[lock],
    crash=1,
    mortal="A",
)
