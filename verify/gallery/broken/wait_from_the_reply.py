"""A pushed grant counts from the reply "still queued", which was itself on its way."""

from verify.gallery.broken.handing import HAND_ON, JOIN, hand_on, join
from verify.gallery.exhibit import TTL, Process, exhibit


async def lock(me: Process) -> None:
    box = me.mailbox(me.name)
    await box.open(me.now() + 1)
    sent_at = me.now()
    if await join(me):
        me.enters(until=sent_at + TTL)
    else:
        queued_at = me.now()
        if await box.wait(me.now() + TTL):
            me.enters(until=queued_at + TTL)
    await me.work()
    me.leaves()
    await hand_on(me)


async def newcomer(me: Process) -> None:
    await me.sleep(1)
    await me.work()
    await lock(me)


EXHIBIT = exhibit(
    "The wait counted from the reply",
    breaks="ME",
    wrong="B is queued, and its answer is slow. Meanwhile A hands over: B's grant is older than the answer that "
    "B counts from, and ends on the server while B still relies on it.",
    cure="Count from when the request was *sent* that was answered “still queued”: the grant came after that.",
    clients={"A": lock, "B": lock, "C": newcomer},
    code=[lock, join, hand_on],
    seconds=3.5,
    slow=1,
)
SCRIPTS = {"JOIN": JOIN, "HAND_ON": HAND_ON}
