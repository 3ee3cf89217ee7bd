-- Give back a grant, or leave the queue, whichever there is; then hand a free lock on.
-- KEYS  1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV  1 holder
-- Gives 1 when the lock was the holder's, 0 when not.
-- Needs no memory: what it writes comes after a removal.

local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local held = call('GET', lock)
local ours = held == ARGV[1]
if ours then
  call('DEL', lock)
else
  local place = call('ZRANK', queue, ARGV[1])
  if place then
    call('ZREM', queue, ARGV[1])
    call('HDEL', waiters, ARGV[1])
    if place == 0 and held then tell_next(queue, waiters, call('PTTL', lock)) end
  end
end
if (ours or not held) and call('EXISTS', queue) == 1 then
  hand_over(lock, meta, queue, waiters, '', clock())
end
return ours and 1 or 0
