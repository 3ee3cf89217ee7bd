-- Key layout, and helpers for the scripts that include this file. `_grant.lua` writes a grant.
--
-- The keys of one lock, all in its cluster slot:
--   lock     string  holder id, with PX: this key alone decides who holds the lock
--   meta     string  "fence start-of-holder-id owner" of the last grant; expires at least a day after the grant
--   queue    zset    holder ids of the waiters, scored by ticket
--   waiters  hash    holder id -> "attempt ttl_ms dead_at_ms inbox fences owner"
--
-- Scripts use server time only. Tickets and fences are microseconds: below 2^53, so exact in a Lua number.
-- The server does not reject a script for lack of memory once it has written, so a hand-off starts with a removal.

local DAY_MS = 86400000

local function fence_in(meta_value)
  return meta_value and tonumber(meta_value:match('^%d+')) or 0
end

-- Never shortens: a repeated request may arrive late, after a renewal with a longer ttl.
local function extend(lock, ttl_ms)
  if call('PTTL', lock) < tonumber(ttl_ms) then call('PEXPIRE', lock, ttl_ms) end
end
