-- Take the lock away from its holder, and hand it on. The fence moves on even if nobody waits.
-- KEYS  1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV  1 holder
-- Gives 1 when the holder had it, 0 when it is free, and the value of the lock when somebody else has it.
-- Needs no memory: what it writes comes after a removal.

local call, format = redis.call, string.format
-- include _layout.lua
-- include _queue.lua

local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local held = call('GET', lock)
if not held then
  return 0
end
if held ~= ARGV[1] then
  return held
end
call('DEL', lock)
-- include _clock.lua
local fence = math.max(now, fence_in(call('GET', meta)) + 1)
call('SET', meta, format('%.0f - ', fence), 'PX', DAY_MS)
hand_over(lock, meta, queue, waiters, '', call('ZPOPMIN', queue)[1], now, digits)
return 1
