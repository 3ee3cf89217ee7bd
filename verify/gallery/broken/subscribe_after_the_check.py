"""A client that checks first and subscribes afterwards misses a message in between."""

from verify.gallery.exhibit import TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        box = me.mailbox("free")
        await box.open(me.now() + 1)
        await box.wait(me.now() + 1000)
        box.close()
    me.enter()
    await me.work()
    me.leave()
    await me.command("DEL", "door")
    for name in "AB":
        await me.command("PUBLISH", f"inbox:{name}:1", "free 1 1")


EXHIBIT = exhibit(
    "Subscribe after the check, without a second check",
    breaks="LW",
    failure="B finds the lock held. Before B has subscribed, A releases the lock and publishes to no subscriber. B "
    "waits for a message that was already sent, while the lock is free.",
    fix="Subscribe before the request, or repeat the request after subscribing. Also poll with a timer, because "
    "messages can be lost.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=2.0,
    listening=False,
)
