"""A queue with hand-off, for several exhibits: a release grants the lock to the first waiter and notifies it."""

from verify.gallery.exhibit import TTL_MS, Process

JOIN = """
-- acquire, or join the queue
if redis.call('GET', KEYS[1]) == ARGV[1] or redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
redis.call('ZADD', KEYS[2], redis.call('ZCARD', KEYS[2]), ARGV[1])
return 0
"""

HAND_OFF = """
-- release and hand off to the first waiter
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local next = redis.call('ZPOPMIN', KEYS[2])[1]
if not next then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], next, 'PX', ARGV[2])
redis.call('PUBLISH', 'inbox:' .. next .. ':1', next .. ' 1 1')
return 1
"""


async def join(me: Process) -> bool:
    return bool(await me.command("EVAL", JOIN, 2, "door", "queue", me.name, TTL_MS))


async def hand_off(me: Process) -> None:
    await me.command("EVAL", HAND_OFF, 2, "door", "queue", me.name, TTL_MS)
