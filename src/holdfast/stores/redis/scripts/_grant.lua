-- Shared by the scripts that grant, which include it (see `scripts.py`): what is written where, and the grant itself.
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
  local life = format('%.0f', ttl_ms + DAY_MS) -- as text: the server takes long to write a number out
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
