-- Give back a grant, or leave the queue, whichever there is; then hand a free lock on.
-- KEYS  1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV  1 holder
-- Gives 1 when the lock was the holder's, 0 when not.
-- Needs no memory: what it writes comes after a removal, if only that of the one who is next.
-- A lock for which nobody waits comes first, before what only the others need is defined.

local call, format = redis.call, string.format
local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local held = call('GET', lock)
local ours = held == ARGV[1]

local function next_in_line()
  return redis.pcall('ZPOPMIN', queue)[1] -- strangers' data in its place must not keep the lock
end

local head = ours and next_in_line()
if ours and not head then
  call('DEL', lock)
  return 1
end

-- include _grant.lua
-- include _queue.lua

if not ours then
  local place = call('ZRANK', queue, ARGV[1])
  if place then
    call('ZREM', queue, ARGV[1])
    call('HDEL', waiters, ARGV[1])
    if place == 0 and held then tell_next(queue, waiters, call('PTTL', lock)) end
  end
  if held then return 0 end
  head = next_in_line()
end
if not (head and hand_over(lock, meta, queue, waiters, '', head, clock())) and ours then
  call('DEL', lock)
end
return ours and 1 or 0
