"""The reply to SET NX is lost, and the client's own key denies the retry."""

from lockfast.errors import StoreUnavailable
from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit


async def acquire(me: Process) -> bool:
    for _ in range(2):
        try:
            return await me.command("SET", "door", me.name, "NX", "PX", TTL_MS) is not None
        except StoreUnavailable:
            continue  # connection lost: the client library retries
    return False


async def worker(me: Process) -> None:
    sent_at = me.now()
    if await acquire(me):
        me.enter(until=sent_at + TTL)
        await me.work()
        me.leave()
    else:
        me.record_denied()


EXHIBIT = exhibit(
    "SET NX repeated after a lost reply",
    breaks="NL",
    failure="The server executed the first SET; only the reply was lost. The retry finds the client's own key and "
    "returns “not acquired”. No client holds the lock, and none can acquire it.",
    fix="Make the acquisition idempotent by holder id: a retry that finds its own id succeeds.",
    clients={"A": worker, "B": worker},
    code=[acquire, worker],
    seconds=2.0,
    lose_reply=1,
)
