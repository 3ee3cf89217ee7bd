-- Give back a grant, or leave the queue, whichever there is; then hand a free lock on.
-- KEYS  1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV  1 holder
-- Gives 1 when the lock was the holder's, 0 when not.
-- Needs no memory: what it writes comes after a removal.
-- A lock for which nobody waits comes first, before what only the others need is defined. Whatever goes wrong in handing
-- it on, a lock that is given back is free.

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
  local place = call('ZRANK', queue, ARGV[1])
  if place then
    call('ZREM', queue, ARGV[1])
    call('HDEL', waiters, ARGV[1])
    if place == 0 and held then tell_next(queue, waiters, call('PTTL', lock)) end
  end
  if held then return 0 end
  head = call('ZPOPMIN', queue)[1]
end
-- include _clock.lua
hand_over(lock, meta, queue, waiters, '', head, now, digits)
return ours and 1 or 0
