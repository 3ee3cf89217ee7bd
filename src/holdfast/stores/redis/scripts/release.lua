-- Give back a grant, or leave the queue, whichever there is; then hand a free lock on.
-- KEYS  1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV  1 holder
-- Gives 1 when the lock was the holder's, 0 when not.
-- Needs no memory: what it writes comes after a removal, if only that of the one who is next.

local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local held = call('GET', lock)
local ours = held == ARGV[1]
if not ours then
  local place = call('ZRANK', queue, ARGV[1])
  if place then
    call('ZREM', queue, ARGV[1])
    call('HDEL', waiters, ARGV[1])
    if place == 0 and held then tell_next(queue, waiters, call('PTTL', lock)) end
  end
end
if held and not ours then return 0 end
local head = redis.pcall('ZPOPMIN', queue)[1] -- strangers' data in its place must not keep the lock
if not (head and hand_over(lock, meta, queue, waiters, '', head, clock())) and ours then
  call('DEL', lock)
end
return ours and 1 or 0
