-- Describe one lock. Changes nothing.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters, 5 grants, 6 details, 7 slots
-- ARGV     1 maximum number of holders, and of waiters
-- Returns  {exists, value of the lock, pttl, meta, now_us, waiting, shared, then per waiter in order: holder, ticket,
--          entry}; shared has, per shared grant in order of its deadline: holder, deadline_us, entry

local value = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local function with_entries(list, hash)
  local rows = {}
  for at = 1, #list, 2 do
    rows[#rows + 1] = list[at]
    rows[#rows + 1] = string.format('%.0f', list[at + 1])
    rows[#rows + 1] = redis.call('HGET', hash, list[at]) or ''
  end
  return rows
end

local now = time[1] * 1000000 + time[2]
local shared = {}
if value == 'lockfast:read' or value == 'lockfast:permits' then
  local live = redis.call('ZRANGEBYSCORE', KEYS[5], string.format('(%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[1])
  shared = with_entries(live, KEYS[6])
end
local answer = {
  value and 1 or 0, value or '', redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) or '',
  now, redis.call('ZCARD', KEYS[3]), shared,
}
for _, field in ipairs(with_entries(redis.call('ZRANGE', KEYS[3], 0, ARGV[1] - 1, 'WITHSCORES'), KEYS[4])) do
  answer[#answer + 1] = field
end
return answer
