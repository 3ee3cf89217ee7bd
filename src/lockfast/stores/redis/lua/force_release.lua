-- End another holder's grant, and hand the lock off. The fence grows even if there is no waiter.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV     1 holder
-- Returns  1 if the holder had the lock; 0 if it is free; the value of the lock if another holder has it.
-- Works without free memory: it writes only after a removal.

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
hand_off(lock, meta, queue, waiters, '', call('ZPOPMIN', queue)[1], now, digits)
return 1
