-- Acquire the lock, or enter or refresh the queue.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters, 5 grants, 6 details, 7 slots
-- ARGV     1 holder, 2 ttl_ms, 3 owner, 4 inbox ('' to try without queueing), 5 attempt, 6 ticket ('' for a new one),
--          7 number of fences to reserve, 8 weight (0 for an exclusive claim), 9 limit (0 for none),
--          10 floor, from a quorum only: the lowest fence to grant, so that its nodes agree on one
-- Returns  fence                     granted: the last reserved fence. The holder's own grant is extended to the full
--                                    ttl and keeps its fence.
--          'fence slots'             granted, with permits
--          {pttl, ticket, position}  queued; pttl is when expired grants may let the claim in, -1 if never
--          {pttl}                    not granted, and no inbox given
--          {value of the lock}       refused: held in the other shared mode, and the holder is not in the queue
-- Idempotent by holder: a repeat after a lost reply returns the same answer.
-- The uncontended case comes first, before the definitions that only the other cases need.

local call, format = redis.call, string.format
local lock, meta, queue, waiters, grants, details, slots = unpack(KEYS)
local holder, ttl_ms, owner, inbox, fences, weight, limit = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[7], ARGV[8], ARGV[9]
-- include _clock.lua

-- A floor more than 1 s ahead of this server's clock comes from a wrong clock, and would raise all later fences.
local stamp, stamp_digits, floor = now, digits, ARGV[10] and tonumber(ARGV[10])
if floor and floor > now and floor < now + 1000000 then stamp, stamp_digits = floor, ARGV[10] end

if call('EXISTS', lock, queue) == 0 then
  local now, digits = stamp, stamp_digits
  if weight == '0' then
    call('SET', lock, holder, 'PX', ttl_ms)
    -- include _fence.lua
    return fence
  end
  local held = false
  -- include _grant_shared.lua
  return list == '-' and fence or fence_digits .. ' ' .. list
end

-- include _layout.lua
-- include _shared.lua
-- include _queue.lua

local function grant(held, now, digits)
  if weight ~= '0' then
    return shared_reply(grant_shared(held, holder, ttl_ms, weight, limit, owner, now, digits))
  end
  call('SET', lock, holder, 'PX', ttl_ms)
  -- include _fence.lua
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
  call('HSET', waiters, holder, table.concat({ARGV[5], ttl_ms, dead_at, inbox, fences, weight, limit, owner}, ' '))
  extend(queue, ttl_ms)
  extend(waiters, ttl_ms)
  return tonumber(ticket)
end

local function queued(held, ticket)
  return {free_in(held, limit), ticket, call('ZRANK', queue, holder)}
end

-- The reply if the holder has the lock already. A quorum may raise the holder's own fence to the one that a majority
-- has.
local function own_grant(held)
  if held == holder then
    extend(lock, ttl_ms)
    local about = call('GET', meta)
    local fence = fence_in(about)
    if floor and fence > 0 and fence < floor then
      call('SET', meta, ARGV[10] .. about:match('^%d+(.*)$'), 'KEEPTTL')
      return floor
    end
    return fence > 0 and fence or grant(false, stamp, stamp_digits)
  end
  local entry = is_shared(held) and call('HGET', details, holder)
  if entry then
    keep_shared(holder, ttl_ms)
    local fence_digits, rest = entry:match('^(%d+)(.*)$')
    if floor and tonumber(fence_digits) < floor then
      fence_digits = ARGV[10]
      call('HSET', details, holder, fence_digits .. rest)
      if fence_in(call('GET', meta)) < floor then
        call('SET', meta, fence_digits .. ' - ', 'PX', format('%.0f', math.max(call('PTTL', meta), ttl_ms + DAY_MS)))
      end
    end
    return shared_reply(fence_digits, rest:match('^ %d+ %d+ (%S+)'))
  end
end

local held = live()
local answer = own_grant(held)
if answer then return answer end
if weight ~= '0' and is_shared(held) and held ~= (limit == '0' and READ or PERMITS) then
  if not call('ZSCORE', queue, holder) then return {held} end
end
local mine = admitted(held, weight, limit)
if call('EXISTS', queue) == 1 then
  local ticket = inbox ~= '' and enqueue()
  -- A claim that only the queue keeps out checks that the head is alive.
  if mine or is_shared(held) then
    serve(held, holder, mine)
    held = live()
    answer = own_grant(held)
    if answer then return answer end
    mine = call('EXISTS', queue) == 0 and admitted(held, weight, limit)
  end
  if ticket then return queued(held, ticket) end
end
if mine then return grant(held, stamp, stamp_digits) end
if inbox == '' then return {free_in(held, limit)} end
return queued(held, enqueue())
