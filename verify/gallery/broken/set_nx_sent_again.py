"""The reply to SET NX was lost, and the retry is refused by one's own key."""

from lockfast.errors import StoreUnavailable
from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def take(me: Process) -> bool:
    for _ in range(2):
        try:
            return await me.command("SET", "door", me.name, "NX", "PX", TTL_MS) is not None
        except StoreUnavailable:
            continue  # the connection broke: the client library tries again
    return False


async def worker(me: Process) -> None:
    sent_at = me.now()
    if await take(me):
        me.enters(until=sent_at + TTL)
        await me.work()
        me.leaves()
    else:
        me.refuses()


EXHIBIT = exhibit(
    "SET NX sent again after a lost reply",
    breaks="NL",
    wrong="The first SET was executed, only its answer got lost. The retry finds the key taken, by ourselves, "
    "and says: not acquired. Nobody holds the lock and nobody can get it.",
    cure="Make taking idempotent by holder id: a retry that finds its own id says yes.",
    clients={"A": worker, "B": worker},
    code=[take, worker],
    seconds=2.0,
    lose_reply=1,
)
