-- Describe many locks, without their waiters. Changes nothing.
-- KEYS     per lock: lock, meta, queue, waiters, grants, details, slots
-- ARGV     1 maximum number of holders per lock
-- Returns  per lock: exists, value, pttl, meta, now_us, waiting, shared; as in inspect.lua
-- A lock key with other data is reported as a lock that does not exist, so that it does not hide the others.

local answer = {}
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function add(value) answer[#answer + 1] = value end
local function text(value) return type(value) == 'string' and value or '' end

local function shared_grants(value, grants, details)
  local rows = {}
  if value ~= 'lockfast:read' and value ~= 'lockfast:permits' then return rows end
  local list = redis.pcall('ZRANGEBYSCORE', grants, string.format('(%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[1])
  for at = 1, #list, 2 do
    rows[#rows + 1] = list[at]
    rows[#rows + 1] = string.format('%.0f', list[at + 1])
    rows[#rows + 1] = text(redis.pcall('HGET', details, list[at]))
  end
  return rows
end

for at = 1, #KEYS, 7 do
  local value = redis.pcall('GET', KEYS[at])
  local waiting = redis.pcall('ZCARD', KEYS[at + 2])
  add(type(value) == 'string' and 1 or 0)
  add(text(value))
  add(redis.call('PTTL', KEYS[at]))
  add(text(redis.pcall('GET', KEYS[at + 1])))
  add(now)
  add(type(waiting) == 'number' and waiting or 0)
  add(shared_grants(value, KEYS[at + 4], KEYS[at + 5]))
end
return answer
