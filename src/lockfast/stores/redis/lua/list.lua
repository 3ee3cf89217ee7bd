-- Describe many locks, without their waiters. Changes nothing.
-- KEYS     lock, meta, queue, waiters of each lock
-- Returns  per lock: exists, holder, pttl, meta, now_us, waiting; as in inspect.lua
-- A lock key with other data is reported as a lock that does not exist, so that it does not hide the others.

local answer = {}
local time = redis.call('TIME')
local function add(value) answer[#answer + 1] = value end
local function text(value) return type(value) == 'string' and value or '' end
for at = 1, #KEYS, 4 do
  local held = redis.pcall('GET', KEYS[at])
  local waiting = redis.pcall('ZCARD', KEYS[at + 2])
  add(type(held) == 'string' and 1 or 0)
  add(text(held))
  add(redis.call('PTTL', KEYS[at]))
  add(text(redis.pcall('GET', KEYS[at + 1])))
  add(time[1] * 1000000 + time[2])
  add(type(waiting) == 'number' and waiting or 0)
end
return answer
