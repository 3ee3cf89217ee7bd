"""Who looks first and listens afterwards misses what is said in between."""

from verify.gallery.exhibit import TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        box = me.mailbox("free")
        await box.open(me.now() + 1)
        await box.wait(me.now() + 1000)
        box.close()
    me.enters()
    await me.work()
    me.leaves()
    await me.command("DEL", "door")
    for name in "AB":
        await me.command("PUBLISH", f"inbox:{name}:1", "free 1 1")


EXHIBIT = exhibit(
    "Subscribe after the check, without checking again",
    breaks="LW",
    wrong="B finds the lock taken. Before B has subscribed, A releases and says so to nobody. B listens for a message "
    "that has been sent already, while the lock is free.",
    cure="Listen first, then ask; or ask once more after subscribing. And look again by a timer, for lost messages.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=2.0,
    listening=False,
)
