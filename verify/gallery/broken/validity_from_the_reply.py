"""The holder's clock starts when the reply arrives; the server's started before."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def lock(me: Process) -> None:
    while not await me.command("SET", "door", me.name, "NX", "PX", TTL_MS):
        await me.sleep(1)
    me.enters(until=me.now() + TTL)
    await me.work()
    me.leaves()


EXHIBIT = exhibit(
    "Validity counted from the reply",
    breaks="ME",
    wrong="The reply is a second on its way. A counts its 3 s from then; the server has counted them from "
    "the beginning, and gives the lock to B a second before A thinks it ends.",
    cure="Count from before the request was sent. That is never too late.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
    slow=1,
)
