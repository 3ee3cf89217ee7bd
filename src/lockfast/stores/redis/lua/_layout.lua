-- What is written where; and, for the scripts that include it (see `scripts.py`), how a fence is read and a ttl prolonged.
-- How a grant is written is in `_grant.lua`.
--
-- The keys of one lock, all in its cluster slot:
--   lock     string  the holder id, with PX: nothing but this decides who holds
--   meta     string  "fence start-of-holder-id owner" of the last grant; lives at least a day longer than was granted
--   queue    zset    holder ids of those who wait, by ticket
--   waiters  hash    holder id -> "turn ttl_ms dead_at_ms inbox fences owner"
--
-- Time is the server's alone. Tickets and fences are microseconds: below 2^53, so exact in a Lua number.
-- A script that has written once is not stopped for want of memory; so a hand-over begins with a removal.

local DAY_MS = 86400000

local function fence_in(meta_value)
  return meta_value and tonumber(meta_value:match('^%d+')) or 0
end

-- Never shortens: a repeat may arrive late, after a renewal with a longer ttl.
local function prolong(lock, ttl_ms)
  if call('PTTL', lock) < tonumber(ttl_ms) then call('PEXPIRE', lock, ttl_ms) end
end
