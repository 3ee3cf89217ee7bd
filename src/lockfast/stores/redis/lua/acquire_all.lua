-- Grant claims for several locks in one step, or none of them.
-- KEYS     per claim: lock, meta, queue, waiters, grants, details, slots
-- ARGV     per claim: holder, ttl_ms, owner, weight, limit
-- Returns  per claim the fence, or 'fence slots' with permits; {} if one of them would have to wait
-- Idempotent by holder: a repeat after a lost reply returns the same answer.

local call, format = redis.call, string.format
local lock, meta, queue, waiters, grants, details, slots
local holder, ttl_ms, owner, weight, limit
-- include _clock.lua
-- include _layout.lua
-- include _shared.lua

local function select_claim(index)
  local key, arg = 7 * index - 6, 5 * index - 4
  lock, meta, queue, waiters, grants, details, slots = unpack(KEYS, key, key + 6)
  holder, ttl_ms, owner, weight, limit = unpack(ARGV, arg, arg + 4)
end

local function own_grant(held)
  local entry = is_shared(held) and call('HGET', details, holder)
  if entry then return shared_reply(entry:match('^(%d+) %d+ %d+ (%S+)')) end
  return held == holder and fence_in(call('GET', meta))
end

local count = #KEYS / 7
for index = 1, count do
  select_claim(index)
  local held = live()
  if not own_grant(held) and (call('EXISTS', queue) == 1 or not admitted(held, weight, limit)) then return {} end
end

local answers = {}
for index = 1, count do
  select_claim(index)
  local held = call('GET', lock)
  answers[index] = own_grant(held)
  if not answers[index] and weight ~= '0' then
    answers[index] = shared_reply(grant_shared(held, holder, ttl_ms, weight, limit, owner, now, digits))
  elseif not answers[index] then
    local fences = 1
    call('SET', lock, holder, 'PX', ttl_ms)
    -- include _fence.lua
    answers[index] = fence
  elseif held == holder then
    extend(lock, ttl_ms)
  else
    keep_shared(holder, ttl_ms)
  end
end
return answers
