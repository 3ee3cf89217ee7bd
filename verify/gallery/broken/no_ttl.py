"""A lock without a ttl outlives a crashed holder."""

from verify.gallery.exhibit import Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SET", "door", me.name, "NX"):
        await me.sleep(1)
    me.enter()
    await me.work()
    me.leave()
    await me.command("DEL", "door")


EXHIBIT = exhibit(
    "A lock without a ttl",
    row="B3",
    breaks="ST",
    failure="The holder crashes. Nothing ever deletes its key, and all other clients wait for ever.",
    fix="A lock always has a ttl, and a live holder renews it.",
    clients={"A": lock, "B": lock},
    code=[lock],
    crash=1,
    mortal="A",
)
