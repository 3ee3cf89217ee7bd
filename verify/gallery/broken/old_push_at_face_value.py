"""A grant that was pushed counts from when it is read, however long it lay in a buffer."""

from verify.gallery.broken.handing import HAND_ON, JOIN, hand_on, join
from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    box = me.mailbox(me.name)
    await box.open(me.now() + 1)
    sent_at = me.now()
    if await join(me):
        me.enters(until=sent_at + TTL)
    elif await box.wait(me.now() + 2 * TTL):
        me.enters(until=me.now() + TTL)
    await me.work()
    me.leaves()
    await hand_on(me)


async def newcomer(me: Process) -> None:
    await me.work()
    await lock(me)


EXHIBIT = exhibit(
    "A pushed grant taken at face value, however old",
    breaks="ME",
    wrong="A hands the lock to B, and the message lies in a buffer while B is stopped. The grant runs out "
    "on the server, and C takes the lock. Then B reads its message and starts counting.",
    cure="A pushed grant has no age of its own: it counts from the last request that was answered “still queued”.",
    clients={"A": lock, "B": lock, "C": newcomer},
    code=[lock, join, hand_on],
    seconds=4.0,
    pause=1,
    mortal="B",
)
SCRIPTS = {"JOIN": JOIN, "HAND_ON": HAND_ON}
