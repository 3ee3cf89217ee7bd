-- Replace the holder by another one, as a new grant in the same mode and with the same slots.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters, 5 grants, 6 details, 7 slots
-- ARGV     1 new holder, 2 ttl_ms, 3 owner, 4 old holder, 5 weight, 6 limit; the last two only tell the mode
-- Returns  the fence, or 'fence slots' with permits; 0 if neither of them has the lock in that mode. A repeat returns
--          the same.

local call, format = redis.call, string.format
local lock, meta, queue, waiters, grants, details, slots = unpack(KEYS)
local holder, ttl_ms, owner, old_holder, fences = ARGV[1], ARGV[2], ARGV[3], ARGV[4], 1
-- include _clock.lua
-- include _layout.lua
-- include _shared.lua

local held = live()
if held == holder then
  extend(lock, ttl_ms)
  return fence_in(call('GET', meta))
end
local own = is_shared(held) and call('HGET', details, holder)
if own then
  keep_shared(holder, ttl_ms)
  return shared_reply(own:match('^(%d+) %d+ %d+ (%S+)'))
end
local exclusive, mode = ARGV[5] == '0', ARGV[6] == '0' and READ or PERMITS
if exclusive and held == old_holder then
  call('SET', lock, holder, 'PX', ttl_ms)
  -- include _fence.lua
  return fence
end
local old = not exclusive and held == mode and call('HGET', details, old_holder)
if not old then return 0 end
drop(old_holder)
local weight, limit, list = old:match('^%d+ (%d+) (%d+) (%S+)')
-- include _fence.lua
for slot in list:gmatch('%d+') do call('SETBIT', slots, slot, '1') end
-- include _add_shared.lua
fit(held)
return shared_reply(fence_digits, list)
