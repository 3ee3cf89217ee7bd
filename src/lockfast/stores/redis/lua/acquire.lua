-- Acquire the lock, or enter or refresh the queue.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV     1 holder, 2 ttl_ms, 3 owner, 4 inbox ('' to try without queueing), 5 attempt, 6 ticket ('' for a new one),
--          7 number of fences to reserve,
--          8 floor, from a quorum only: the lowest fence to grant, so that its nodes agree on one
-- Returns  fence                     granted: the last reserved fence. The holder's own grant is extended to the full
--                                    ttl and keeps its fence.
--          {pttl, ticket, position}  queued; pttl is -1 if the holder has no ttl
--          {pttl}                    held by another, and no inbox given
-- Idempotent by holder: a repeat after a lost reply returns the same answer.
-- The uncontended case comes first, before the definitions that only the other cases need.

local call, format = redis.call, string.format
local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local holder, ttl_ms, owner, inbox, fences = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[7]
-- include _clock.lua

-- A floor more than 1 s ahead of this server's clock comes from a wrong clock, and would raise all later fences.
local stamp, stamp_digits, floor = now, digits, ARGV[8] and tonumber(ARGV[8])
if floor and floor > now and floor < now + 1000000 then stamp, stamp_digits = floor, ARGV[8] end

if call('EXISTS', lock, queue) == 0 then
  local now, digits = stamp, stamp_digits
  -- include _grant.lua
  return fence
end

-- include _layout.lua
-- include _queue.lua

local function grant(now, digits)
  -- include _grant.lua
  return fence
end

-- An earlier ticket wins: a waiter that was skipped while its connection was down does not move to the end, even if an
-- old request without a ticket was executed late and queued it there.
local function enqueue()
  local ticket = call('ZSCORE', queue, holder)
  if not ticket or (tonumber(ARGV[6]) or math.huge) < tonumber(ticket) then
    ticket = ARGV[6]
    if ticket == '' then
      local last = call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
      ticket = format('%.0f', math.max(now, (tonumber(last) or 0) + 1))
    end
    call('ZADD', queue, ticket, holder)
  end
  local dead_at = format('%.0f', now / 1000 + ttl_ms)
  call('HSET', waiters, holder, table.concat({ARGV[5], ttl_ms, dead_at, inbox, fences, owner}, ' '))
  for _, key in ipairs({queue, waiters}) do
    if call('PTTL', key) < tonumber(ttl_ms) then call('PEXPIRE', key, ttl_ms) end
  end
  return tonumber(ticket)
end

local held = call('GET', lock)
if not held then
  if inbox ~= '' then enqueue() end
  hand_off(lock, meta, queue, waiters, holder, call('ZPOPMIN', queue)[1], now, digits)
  held = call('GET', lock)
  if not held then
    return grant(stamp, stamp_digits)
  end
end
if held == holder then
  extend(lock, ttl_ms)
  local details = call('GET', meta)
  local fence = fence_in(details)
  -- A quorum may raise the holder's own fence to the one that a majority has.
  if floor and fence > 0 and fence < floor then
    call('SET', meta, ARGV[8] .. details:match('^%d+(.*)$'), 'KEEPTTL')
    return floor
  end
  return fence > 0 and fence or grant(stamp, stamp_digits)
end
if inbox == '' then
  return {call('PTTL', lock)}
end
local ticket = enqueue()
return {call('PTTL', lock), ticket, call('ZRANK', queue, holder)}
