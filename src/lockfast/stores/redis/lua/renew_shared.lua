-- Renew many shared grants, each only if its holder still has it. Like renew.lua, it never shortens unless final.
-- KEYS     per grant: lock, meta, queue, waiters, grants, details, slots
-- ARGV     holder and ttl_ms of each grant; then, only if a renewal is final, a text with one digit per grant: 1 for a
--          final renewal, else 0
-- Returns  a list of 1 (renewed) and 0 (the holder does not have it)
-- A grant that is about to be downgraded may still be exclusive. A key with other data is nobody's grant.
-- Works without free memory: PEXPIRE comes first.

local call, format = redis.call, string.format
local lock, meta, queue, waiters, grants, details, slots
-- include _clock.lua
-- include _layout.lua
-- include _shared.lua

local answers = {}
local count = #KEYS / 7
local final = ARGV[2 * count + 1] or ''
for index = 1, count do
  local at = 7 * index - 6
  lock, meta, grants, details, slots = KEYS[at], KEYS[at + 1], KEYS[at + 4], KEYS[at + 5], KEYS[at + 6]
  local holder, ttl_ms = ARGV[2 * index - 1], ARGV[2 * index]
  local held = redis.pcall('GET', lock)
  if type(held) == 'table' and held.err and not held.err:find('WRONGTYPE', 1, true) then return held end
  local score = is_shared(held) and redis.pcall('ZSCORE', grants, holder)
  local deadline = type(score) == 'string' and tonumber(score)
  local is_final = final:byte(index) == 49
  answers[index] = 1
  if held == holder then
    call('PEXPIRE', meta, ttl_ms + DAY_MS)
    if is_final then call('PEXPIRE', lock, ttl_ms) else extend(lock, ttl_ms) end
  elseif deadline and deadline > now then
    call('PEXPIRE', meta, ttl_ms + DAY_MS)
    keep_shared(holder, ttl_ms)
    if is_final then
      call('ZADD', grants, deadline_in(ttl_ms), holder)
      fit(held)
    end
  else
    answers[index] = 0
  end
end
return answers
