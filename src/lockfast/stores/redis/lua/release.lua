-- Release the holder's grant or remove it from the queue; then serve the queue.
-- KEYS     1 lock, 2 meta, 3 queue, 4 waiters, 5 grants, 6 details, 7 slots
-- ARGV     1 holder
-- Returns  1 if the holder had a grant, 0 if not.
-- Works without free memory: it writes only after a removal. If the hand-off fails, the grant is gone.
-- The uncontended case comes first, before the definitions that only the other cases need.

local call, format = redis.call, string.format
local lock, meta, queue, waiters, grants, details, slots = unpack(KEYS)
local held, head = call('GET', lock), nil
local ours = held == ARGV[1]
if ours then
  call('DEL', lock)
  head = call('ZPOPMIN', queue)[1]
  if not head then return 1 end
elseif held == 'lockfast:read' or held == 'lockfast:permits' then
  local first, second = unpack(call('ZRANGE', grants, '0', '1'))
  if first == ARGV[1] and not second and call('EXISTS', queue) == 0 then
    call('DEL', lock, grants, details, slots)
    return 1
  end
end

-- include _clock.lua
-- include _layout.lua
-- include _shared.lua
-- include _queue.lua

local notify = true
if ours then
  held = false
else
  held = live()
  ours = is_shared(held) and call('ZSCORE', grants, ARGV[1])
  if ours then
    drop(ARGV[1])
    held = fit(held)
  else
    notify = call('ZRANK', queue, ARGV[1]) == 0
    remove(ARGV[1])
  end
end
serve(held, '', notify, head)
return ours and 1 or 0
