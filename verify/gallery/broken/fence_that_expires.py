"""A fence counter that expires with the lock restarts at 1."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit

ACQUIRE = """
-- acquire and count
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
local fence = redis.call('INCR', KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return fence
"""


async def lock(me: Process) -> None:
    sent_at = me.now()
    while not (fence := await me.command("EVAL", ACQUIRE, 2, "door", "fence", me.name, TTL_MS)):
        await me.sleep(1)
        sent_at = me.now()
    me.enter(until=sent_at + TTL, fence=fence)
    await me.work()
    me.leave()


EXHIBIT = exhibit(
    "A fence counter that expires with the lock",
    breaks="FT",
    failure="The counter has the ttl of the lock, so both expire together. The next holder gets the same number, and "
    "the protected resource cannot reject a late write of the previous one.",
    fix="Derive the fence from the server's clock and the last fence, whichever is greater; then the loss of the "
    "counter does no harm.",
    clients={"A": lock, "B": lock},
    code=[lock],
    scripts=[ACQUIRE],
    seconds=4.5,
    fence_key=b"fence",
)
