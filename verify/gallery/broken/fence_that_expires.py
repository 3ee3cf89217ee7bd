"""A counter for fences that goes with the lock starts again at 1."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit

TAKE = """
-- take and count
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
local fence = redis.call('INCR', KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return fence
"""


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not (fence := await me.command("EVAL", TAKE, 2, "door", "fence", me.name, TTL_MS)):
        await me.sleep(1)
        sent_at = me.now()
    me.enters(until=sent_at + TTL, fence=fence)
    await me.work()
    me.leaves()


EXHIBIT = exhibit(
    "A fence counter that expires with the lock",
    breaks="FT",
    wrong="The counter has the lock's ttl, so it is gone when the lock is. The next holder gets the same number, and "
    "the protected resource can't tell a late write of the old one from its own.",
    cure="Carry the fence by the server's clock, greater than the last one; then losing the counter does no harm.",
    clients={"A": lock, "B": lock},
    code=[lock],
    seconds=4.5,
    fence_key=b"fence",
)
SCRIPTS = {"TAKE": TAKE}
