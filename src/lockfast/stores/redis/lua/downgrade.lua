-- Turn an exclusive grant into that of a reader, with the same fence; then serve the queue.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters, 5 grants, 6 details, 7 slots
-- ARGV     1 holder, 2 ttl_ms, 3 owner
-- Returns  1 if the holder has the lock, now as a reader; 0 if not. A repeat returns the same.

local call, format = redis.call, string.format
local lock, meta, queue, waiters, grants, details, slots = unpack(KEYS)
local holder, ttl_ms, owner = ARGV[1], ARGV[2], ARGV[3]
-- include _clock.lua
-- include _layout.lua
-- include _shared.lua
-- include _queue.lua

local held = live()
if held == holder then
  -- The grant keeps what it has left, if that is more: an earlier renewal may have had a longer ttl.
  ttl_ms = format('%.0f', math.max(tonumber(ttl_ms), call('PTTL', lock)))
  local fence_digits = format('%.0f', math.max(1, fence_in(call('GET', meta))))
  call('DEL', lock, grants, details, slots)
  local held, weight, limit, list = false, '1', '0', '-'
  -- include _add_shared.lua
elseif held == READ and call('HGET', details, holder) then
  keep_shared(holder, ttl_ms)
else
  return 0
end
serve(READ, '', true)
return 1
