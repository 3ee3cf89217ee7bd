-- Replace the holder by another one, as a new grant.
-- KEYS     1 lock, 2 meta
-- ARGV     1 new holder, 2 ttl_ms, 3 owner, 4 old holder
-- Returns  the fence; 0 if neither of them holds the lock. A repeat returns the same fence.

local call, format = redis.call, string.format
-- include _layout.lua

local held = call('GET', KEYS[1])
if held == ARGV[1] then
  extend(KEYS[1], ARGV[2])
  return fence_in(call('GET', KEYS[2]))
end
if held ~= ARGV[4] then
  return 0
end
local lock, meta, holder, ttl_ms, owner, fences = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], 1
-- include _clock.lua
-- include _grant.lua
return fence
