-- Take the lock, or join or keep the queue.
-- KEYS  1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV  1 holder, 2 ttl_ms, 3 owner, 4 inbox ('' to try only), 5 turn, 6 ticket ('' for a new one)
-- Gives {1, fence}                              granted, or ours already: then with the same fence and a full ttl
--       {2, pttl, ticket, position}             queued; pttl is -1 when the holder has no ttl
--       {0, pttl}                               taken, and not asked to queue
-- Idempotent by holder: a repeat after a lost reply gives the same answer.

local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local holder, ttl_ms, owner, inbox = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now = now_us()

-- A ticket from before keeps its place: whoever was passed over while its connection was down is not sent to
-- the end.
local function join()
  local ticket = redis.call('ZSCORE', queue, holder)
  if not ticket then
    if ARGV[6] == '' then
      local last = redis.call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
      ticket = whole(math.max(now, (tonumber(last) or 0) + 1))
    else
      ticket = ARGV[6]
    end
    redis.call('ZADD', queue, ticket, holder)
  end
  redis.call('HSET', waiters, holder, table.concat({ARGV[5], ttl_ms, whole(now / 1000 + ttl_ms), inbox, owner}, ' '))
  for _, key in ipairs({queue, waiters}) do
    if redis.call('PTTL', key) < tonumber(ttl_ms) then redis.call('PEXPIRE', key, ttl_ms) end
  end
  return ticket
end

local held = redis.call('GET', lock)
if not held then
  if redis.call('EXISTS', queue) == 0 then
    return {1, grant(lock, meta, holder, ttl_ms, owner, next_fence(meta, now), now)}
  end
  if inbox ~= '' then join() end
  hand_over(lock, meta, queue, waiters, holder, now)
  held = redis.call('GET', lock)
  if not held then
    return {1, grant(lock, meta, holder, ttl_ms, owner, next_fence(meta, now), now)}
  end
end
if held == holder then
  redis.call('PEXPIRE', lock, ttl_ms)
  local fence = last_fence(meta)
  if fence == 0 then fence = grant(lock, meta, holder, ttl_ms, owner, now, now) end
  return {1, fence}
end
if inbox == '' then
  return {0, redis.call('PTTL', lock)}
end
local ticket = join()
return {2, redis.call('PTTL', lock), tonumber(ticket), redis.call('ZRANK', queue, holder)}
