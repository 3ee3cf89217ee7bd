-- Take the lock, or join or keep the queue.
-- KEYS  1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV  1 holder, 2 ttl_ms, 3 owner, 4 inbox ('' to try only), 5 turn, 6 ticket ('' for a new one)
-- Gives fence                       granted, or ours already: then with the same fence and a full ttl
--       {pttl, ticket, position}    queued; pttl is -1 when the holder has no ttl
--       {pttl}                      taken, and not asked to queue
-- Idempotent by holder: a repeat after a lost reply gives the same answer.

local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local holder, ttl_ms, owner, inbox = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now, digits = clock()

if call('EXISTS', lock, queue) == 0 then
  return grant(lock, meta, holder, ttl_ms, owner, now, digits)
end

-- A ticket from before keeps its place: whoever was passed over while its connection was down is not sent to
-- the end.
local function join()
  local ticket = call('ZSCORE', queue, holder)
  if not ticket then
    ticket = ARGV[6]
    if ticket == '' then
      local last = call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
      ticket = format('%.0f', math.max(now, (tonumber(last) or 0) + 1))
    end
    call('ZADD', queue, ticket, holder)
  end
  call('HSET', waiters, holder, format('%s %s %.0f %s %s', ARGV[5], ttl_ms, now / 1000 + ttl_ms, inbox, owner))
  for _, key in ipairs({queue, waiters}) do
    if call('PTTL', key) < tonumber(ttl_ms) then call('PEXPIRE', key, ttl_ms) end
  end
  return tonumber(ticket)
end

local held = call('GET', lock)
if not held then
  if inbox ~= '' then join() end
  hand_over(lock, meta, queue, waiters, holder, now, digits)
  held = call('GET', lock)
  if not held then
    return grant(lock, meta, holder, ttl_ms, owner, now, digits)
  end
end
if held == holder then
  prolong(lock, ttl_ms)
  local fence = fence_in(call('GET', meta))
  return fence > 0 and fence or grant(lock, meta, holder, ttl_ms, owner, now, digits)
end
if inbox == '' then
  return {call('PTTL', lock)}
end
local ticket = join()
return {call('PTTL', lock), ticket, call('ZRANK', queue, holder)}
