"""A release hands the lock off to the first waiter, dead or alive."""

from verify.gallery.broken.hand_off import HAND_OFF, JOIN, hand_off, join
from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    box = me.mailbox(me.name)
    await box.open(me.now() + 1)
    sent_at = me.now()
    if not await join(me):
        await box.wait(me.now() + 1000)
    me.enter(until=sent_at + TTL)
    await me.work()
    me.leave()
    await hand_off(me)


EXHIBIT = exhibit(
    "Hand-off to a dead waiter",
    breaks="LW",
    failure="B is first in the queue and crashes. A hands the lock off to B. PUBLISH reports zero receivers, and the "
    "script ignores that. When B's grant has expired, C keeps sleeping although the lock is free.",
    fix="PUBLISH returns the number of receivers: if it is zero, try the next waiter. In addition, waiters poll when "
    "the holder's ttl ends.",
    clients={"A": lock, "B": lock, "C": lock},
    code=[lock, join, hand_off],
    scripts=[JOIN, HAND_OFF],
    seconds=3.5,
    crash=1,
    mortal="B",
)
