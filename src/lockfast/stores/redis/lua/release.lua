-- Release the holder's grant or remove it from the queue; then hand a free lock off.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV     1 holder
-- Returns  1 if the holder had the lock, 0 if not.
-- Works without free memory: it writes only after a removal. If the hand-off fails, the lock is free.
-- The uncontended case comes first, before the definitions that only the other cases need.

local call, format = redis.call, string.format
local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local held = call('GET', lock)
local ours = held == ARGV[1]
local head
if ours then
  call('DEL', lock)
  head = call('ZPOPMIN', queue)[1]
  if not head then return 1 end
end

-- include _queue.lua

if not ours then
  local rank = call('ZRANK', queue, ARGV[1])
  if rank then
    call('ZREM', queue, ARGV[1])
    call('HDEL', waiters, ARGV[1])
    if rank == 0 and held then notify_first(queue, waiters, call('PTTL', lock)) end
  end
  if held then return 0 end
  head = call('ZPOPMIN', queue)[1]
end
-- include _clock.lua
hand_off(lock, meta, queue, waiters, '', head, now, digits)
return ours and 1 or 0
