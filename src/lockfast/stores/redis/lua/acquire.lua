-- Take the lock, or join or keep the queue.
-- KEYS  1 lock, 2 meta, 3 queue, 4 waiters
-- ARGV  1 holder, 2 ttl_ms, 3 owner, 4 inbox ('' to try only), 5 turn, 6 ticket ('' for a new one),
--       7 how many fences to reserve,
--       8 floor, which only a quorum gives: the fence is to be no less, so that the nodes of a quorum agree on one
-- Gives fence                       the last of those reserved; granted, or ours already: then with the same fence and a full ttl
--       {pttl, ticket, position}    queued; pttl is -1 when the holder has no ttl
--       {pttl}                      taken, and not asked to queue
-- Idempotent by holder: a repeat after a lost reply gives the same answer.
-- A free lock for which nobody waits comes first, before what only the others need is defined.

local call, format = redis.call, string.format
local lock, meta, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local holder, ttl_ms, owner, inbox, fences = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[7]
-- include _clock.lua

-- A floor that is far ahead of our own clock came from a wrong one: heeding it would spoil the fences to come.
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

-- A ticket from before keeps its place: whoever was passed over while its connection was down is not sent to
-- the end, though an old request without a ticket, executed late, has joined there meanwhile.
local function join()
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
  if inbox ~= '' then join() end
  hand_over(lock, meta, queue, waiters, holder, call('ZPOPMIN', queue)[1], now, digits)
  held = call('GET', lock)
  if not held then
    return grant(stamp, stamp_digits)
  end
end
if held == holder then
  prolong(lock, ttl_ms)
  local about = call('GET', meta)
  local fence = fence_in(about)
  -- Our own grant may be raised to whatever a majority was found to have.
  if floor and fence > 0 and fence < floor then
    call('SET', meta, ARGV[8] .. about:match('^%d+(.*)$'), 'KEEPTTL')
    return floor
  end
  return fence > 0 and fence or grant(stamp, stamp_digits)
end
if inbox == '' then
  return {call('PTTL', lock)}
end
local ticket = join()
return {call('PTTL', lock), ticket, call('ZRANK', queue, holder)}
