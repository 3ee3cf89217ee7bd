"""A notified grant counts from the moment of reading, however old the notification is."""

from verify.gallery.broken.hand_off import HAND_OFF, JOIN, hand_off, join
from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    box = me.mailbox(me.name)
    await box.open(me.now() + 1)
    sent_at = me.now()
    if await join(me):
        me.enter(until=sent_at + TTL)
    elif await box.wait(me.now() + 2 * TTL):
        me.enter(until=me.now() + TTL)
    await me.work()
    me.leave()
    await hand_off(me)


async def newcomer(me: Process) -> None:
    await me.work()
    await lock(me)


EXHIBIT = exhibit(
    "A stale grant notification",
    breaks="ME",
    failure="A hands the lock off to B, and the notification stays in a buffer while B is paused. The grant expires "
    "on the server, and C acquires the lock. Then B reads the notification and starts to count.",
    fix="A notification has no age of its own. Count the grant from the last request that the server answered with "
    "“still queued”.",
    clients={"A": lock, "B": lock, "C": newcomer},
    code=[lock, join, hand_off],
    scripts=[JOIN, HAND_OFF],
    seconds=4.0,
    pause=1,
    mortal="B",
)
