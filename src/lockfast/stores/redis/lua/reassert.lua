-- Restore a grant that this server lost in a failover.
-- KEYS     1 lock, 2 meta
-- ARGV     1 holder, 2 ttl_ms, 3 owner, 4 fence
-- Returns  1 if the holder has the lock, with that fence; 0 if not.
-- A server with the same fence in `meta` knew this grant, so it expired or was force-released. A server with a greater
-- fence granted the lock to another holder. Neither is undone. Later grants continue from the restored fence.

local call, format = redis.call, string.format
-- include _layout.lua

local held = call('GET', KEYS[1])
if held == ARGV[1] then
  extend(KEYS[1], ARGV[2])
  return 1
end
if held or fence_in(call('GET', KEYS[2])) >= tonumber(ARGV[4]) then
  return 0
end
call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
call('SET', KEYS[2], ARGV[4] .. ' ' .. ARGV[1]:sub(1, 6) .. ' ' .. ARGV[3], 'PX', ARGV[2] + DAY_MS)
return 1
