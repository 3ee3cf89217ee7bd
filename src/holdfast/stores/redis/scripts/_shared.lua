-- Shared by the scripts that grant; put in front of each when it is loaded.
--
-- The keys of one lock, all in its cluster slot:
--   lock     string  the holder id, with PX: nothing but this decides who holds
--   meta     string  "fence start-of-holder-id owner" of the last grant; lives a day longer than that grant
--   queue    zset    holder ids of those who wait, by ticket
--   waiters  hash    holder id -> "turn ttl_ms dead_at_ms inbox fences owner"
--
-- Time is the server's alone. Tickets and fences are microseconds: below 2^53, so exact in a Lua number.
-- A script that has written once is not stopped for want of memory; so a hand-over begins with a removal.

local DAY_MS = 86400000
local call, format = redis.call, string.format

-- The time in microseconds, as a number and as its digits.
local function clock()
  local time = call('TIME')
  local digits = format('%s%06d', time[1], time[2])
  return tonumber(digits), digits
end

local function fence_in(meta_value)
  return meta_value and tonumber(meta_value:match('^%d+')) or 0
end

-- The fence is the time, or as many more than the last as are reserved if that is not less: the clock carries it over a
-- loss of `meta`, and `meta` over a clock that stood still or went back. It is the last of those reserved. Without a
-- `meta`, which may have been lost just now, the first of them is the time: what was given before is less.
local function grant(lock, meta, holder, ttl_ms, owner, now, digits, fences)
  local about = ' ' .. holder:sub(1, 6) .. ' ' .. owner
  local life = ttl_ms + DAY_MS
  call('SET', lock, holder, 'PX', ttl_ms)
  local last = fence_in(call('SET', meta, digits .. about, 'PX', life, 'GET'))
  if last == 0 then last = now - 1 end
  if last + fences <= now then return now end
  call('SET', meta, format('%.0f', last + fences) .. about, 'PX', life)
  return last + fences
end

-- Never shortens: a repeat may arrive late, after a renewal with a longer ttl.
local function prolong(lock, ttl_ms)
  if call('PTTL', lock) < tonumber(ttl_ms) then call('PEXPIRE', lock, ttl_ms) end
end

-- An inbox in braces is a channel of this slot, to be told within its shard; PUBLISH would tell the whole cluster.
local function tell(inbox, message)
  return call(inbox:find('{', 1, true) and 'SPUBLISH' or 'PUBLISH', inbox, message)
end

-- Tell whoever is first in the queue now, and for how long the holder may hold, so that its timer is right. One
-- that does not receive it is dead, and removed.
local function tell_next(queue, waiters, ttl_ms)
  while true do
    local head = call('ZRANGE', queue, 0, 0)[1]
    if not head then return end
    local turn, inbox = (call('HGET', waiters, head) or ''):match('^(%d+) %d+ %d+ (%S+)')
    if turn and tell(inbox, format('%s %s next %s', head, turn, ttl_ms)) > 0 then return end
    call('ZREM', queue, head)
    call('HDEL', waiters, head)
  end
end

-- Give the lock to the first who is alive, beginning with `head`, which was taken from the queue already; true when
-- somebody has it. PUBLISH tells how many received it: nobody means a dead waiter. `asker` is alive, since it asks; it
-- learns by the reply and needs no push.
local function hand_over(lock, meta, queue, waiters, asker, head, now, digits)
  while head do
    local entry = call('HGET', waiters, head)
    call('HDEL', waiters, head)
    if entry then
      local turn, ttl_ms, dead_at, inbox, fences, owner = entry:match('^(%d+) (%d+) (%d+) (%S+) (%d+) (.*)$')
      if head == asker or tonumber(dead_at) * 1000 > now then
        local fence = grant(lock, meta, head, ttl_ms, owner, now, digits, fences)
        if head == asker or tell(inbox, format('%s %s %.0f', head, turn, fence)) > 0 then
          tell_next(queue, waiters, ttl_ms)
          return true
        end
        call('DEL', lock)
      end
    end
    head = call('ZPOPMIN', queue)[1]
  end
end
