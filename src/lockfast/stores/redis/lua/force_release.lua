-- End another holder's grant, and serve the queue. The fence grows even if there is no waiter.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters, 5 grants, 6 details, 7 slots
-- ARGV     1 holder
-- Returns  1 if the holder had a grant; 0 if it had none; the value of the lock if another program's holder has it.
-- Works without free memory: it writes only after a removal.

local call, format = redis.call, string.format
local lock, meta, queue, waiters, grants, details, slots = unpack(KEYS)
-- include _clock.lua
-- include _layout.lua
-- include _shared.lua
-- include _queue.lua

local held = live()
if is_shared(held) then
  if not call('HGET', details, ARGV[1]) then return 0 end
  drop(ARGV[1])
  held = fit(held)
elseif held == ARGV[1] then
  call('DEL', lock)
  held = false
else
  return held or 0
end
local fence = math.max(now, fence_in(call('GET', meta)) + 1)
call('SET', meta, format('%.0f - ', fence), 'PX', DAY_MS)
serve(held, '', true)
return 1
