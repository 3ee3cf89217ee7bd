-- Describe one lock. Changes nothing.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV     1 maximum number of waiters
-- Returns  {exists, holder, pttl, meta, now_us, waiting, then per waiter in order: holder, ticket, entry}

local held = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local answer = {
  held and 1 or 0, held or '', redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) or '',
  time[1] * 1000000 + time[2], redis.call('ZCARD', KEYS[3]),
}
local queue = redis.call('ZRANGE', KEYS[3], 0, ARGV[1] - 1, 'WITHSCORES')
for at = 1, #queue, 2 do
  answer[#answer + 1] = queue[at]
  answer[#answer + 1] = string.format('%.0f', queue[at + 1])
  answer[#answer + 1] = redis.call('HGET', KEYS[4], queue[at]) or ''
end
return answer
