"""The lock is handed to the first in the queue, alive or not."""

from verify.gallery.broken.handing import HAND_ON, JOIN, hand_on, join
from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    box = me.mailbox(me.name)
    await box.open(me.now() + 1)
    sent_at = me.now()
    if not await join(me):
        await box.wait(me.now() + 1000)
    me.enters(until=sent_at + TTL)
    await me.work()
    me.leaves()
    await hand_on(me)


EXHIBIT = exhibit(
    "Hand-off to a dead waiter, without taking the next",
    breaks="LW",
    wrong="B waits first in the queue and dies. A hands the lock to it; PUBLISH says that nobody received the message, "
    "and nobody looks. When B's grant has run out, C sleeps on in front of a free lock.",
    cure="PUBLISH tells how many received it: if none did, take the next. And whoever waits looks at the holder's "
    "expiry.",
    clients={"A": lock, "B": lock, "C": lock},
    code=[lock, join, hand_on],
    seconds=3.5,
    crash=1,
    mortal="B",
)
SCRIPTS = {"JOIN": JOIN, "HAND_ON": HAND_ON}
