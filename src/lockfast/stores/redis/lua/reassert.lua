-- Take back in a grant that this server has forgotten, as after a failover.
-- KEYS  1 lock, 2 meta
-- ARGV  1 holder, 2 ttl_ms, 3 owner, 4 fence
-- Gives 1 when the lock is the holder's, with that fence; 0 when not.
-- A server that knows of a grant with the same fence knew this one, so the lock was taken away or expired; and one that
-- knows of a greater fence gave the lock to another. Neither is undone. Later grants continue from the fence.

local call, format = redis.call, string.format
-- include _layout.lua

local held = call('GET', KEYS[1])
if held == ARGV[1] then
  prolong(KEYS[1], ARGV[2])
  return 1
end
if held or fence_in(call('GET', KEYS[2])) >= tonumber(ARGV[4]) then
  return 0
end
call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
call('SET', KEYS[2], ARGV[4] .. ' ' .. ARGV[1]:sub(1, 6) .. ' ' .. ARGV[3], 'PX', ARGV[2] + DAY_MS)
return 1
