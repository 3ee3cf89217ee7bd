"""A notified grant counts from the reply "still queued", which was slow itself."""

from verify.gallery.broken.hand_off import HAND_OFF, JOIN, hand_off, join
from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    box = me.mailbox(me.name)
    await box.open(me.now() + 1)
    sent_at = me.now()
    if await join(me):
        me.enter(until=sent_at + TTL)
    else:
        queued_at = me.now()
        if await box.wait(me.now() + TTL):
            me.enter(until=queued_at + TTL)
    await me.work()
    me.leave()
    await hand_off(me)


async def newcomer(me: Process) -> None:
    await me.sleep(1)
    await me.work()
    await lock(me)


EXHIBIT = exhibit(
    "A notified grant counted from the reply",
    breaks="ME",
    failure="B is queued, and the reply is slow. Meanwhile A hands the lock off: B's grant is older than the reply "
    "from which B counts, and expires on the server while B still relies on it.",
    fix="Count from the moment at which the request that was answered with “still queued” was *sent*: the grant came "
    "later.",
    clients={"A": lock, "B": lock, "C": newcomer},
    code=[lock, join, hand_off],
    scripts=[JOIN, HAND_OFF],
    seconds=3.5,
    slow=1,
)
