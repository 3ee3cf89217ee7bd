-- Shared by the scripts that grant; put in front of each when it is loaded.
--
-- The keys of one lock, all in its cluster slot:
--   lock     string  the holder id, with PX: nothing but this decides who holds
--   meta     string  "fence since_ms holder owner" of the last grant; a day longer than that grant
--   queue    zset    holder ids of those who wait, by ticket
--   waiters  hash    holder id -> "turn ttl_ms dead_at_ms inbox owner"
--
-- Time is the server's alone. Tickets and fences are microseconds: below 2^53, so exact in a Lua number.
-- A script that has written once is not stopped for want of memory; so a hand-over begins with a removal.

local DAY_MS = 86400000

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function whole(number)
  return string.format('%.0f', number)
end

local function last_fence(meta)
  local value = redis.call('GET', meta)
  return value and tonumber(string.match(value, '^%d+')) or 0
end

-- The clock carries the fence over a loss of `meta`; the last one carries it over a clock that stood still.
local function next_fence(meta, now)
  return math.max(last_fence(meta) + 1, now)
end

local function grant(lock, meta, holder, ttl_ms, owner, fence, now)
  redis.call('SET', lock, holder, 'PX', ttl_ms)
  redis.call('SET', meta, whole(fence) .. ' ' .. whole(now / 1000) .. ' ' .. string.sub(holder, 1, 6) .. ' ' .. owner,
    'PX', whole(ttl_ms + DAY_MS))
  return fence
end

-- Give a free lock to the first who is alive. PUBLISH tells how many received it: nobody means a dead waiter.
-- `asker` is alive, since it asks; it learns by the reply and needs no push.
local function hand_over(lock, meta, queue, waiters, asker, now)
  while true do
    local head = redis.call('ZPOPMIN', queue)[1]
    if not head then return end
    local entry = redis.call('HGET', waiters, head)
    redis.call('HDEL', waiters, head)
    if entry then
      local turn, ttl_ms, dead_at, inbox, owner = string.match(entry, '^(%d+) (%d+) (%d+) (%S+) (.*)$')
      local fence = next_fence(meta, now)
      if head == asker or (tonumber(dead_at) * 1000 > now
          and redis.call('PUBLISH', inbox, head .. ' ' .. turn .. ' ' .. whole(fence)) > 0) then
        grant(lock, meta, head, ttl_ms, owner, fence, now)
        return
      end
    end
  end
end
