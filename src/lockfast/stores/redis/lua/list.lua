-- What is known of many locks, without their waiters; changes nothing.
-- KEYS  lock, meta, queue, waiters of each, in turn
-- Gives for each, in turn: exists, holder, pttl, meta, now_us, waiting; as inspect.lua does.
-- A key that holds other data is no lock, and must not hide the others: it is told as one that does not exist.

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
