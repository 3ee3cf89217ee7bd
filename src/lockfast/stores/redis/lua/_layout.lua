-- Key layout, and helpers for the scripts that include this file.
--
-- The keys of one lock, all in its cluster slot:
--   lock     string  holder id, with PX: this key alone decides who holds the lock. While shared grants are live, it is
--                    READ or PERMITS instead, and lasts as long as the longest of them: other libraries stay out too
--   meta     string  "fence start-of-holder-id owner" of the last grant; expires at least a day after the grant
--   queue    zset    holder ids of the waiters, scored by ticket
--   waiters  hash    holder id -> "attempt ttl_ms dead_at_ms inbox fences weight limit owner"
--   grants   zset    holder ids of the shared grants, scored by their deadline in microseconds
--   details  hash    holder id -> "fence weight limit slots owner"; slots is "0,3", or "-" without permits
--   slots    string  bitmap: bit n is set while slot n belongs to a live grant
-- The last three mean nothing while `lock` is not READ or PERMITS. A weight of 0 is an exclusive claim, and a limit of
-- 0 is no limit. `admission.py` has the rules that decide which claim is granted.
--
-- Scripts use server time only. Tickets and fences are microseconds: below 2^53, so exact in a Lua number.
-- The server does not reject a script for lack of memory once it has written, so a hand-off starts with a removal.

local DAY_MS = 86400000
local READ, PERMITS = 'lockfast:read', 'lockfast:permits'

local function fence_in(meta_value)
  return meta_value and tonumber(meta_value:match('^%d+')) or 0
end

-- Never shortens: a repeated request may arrive late, after a renewal with a longer ttl.
local function extend(key, ttl_ms)
  if call('PTTL', key) < tonumber(ttl_ms) then call('PEXPIRE', key, ttl_ms) end
end
