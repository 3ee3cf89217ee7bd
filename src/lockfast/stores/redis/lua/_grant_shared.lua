-- Grant a shared claim that is admitted. Lines, not a function, as in `_fence.lua`.
-- Needs    the keys; holder, ttl_ms, owner, weight, limit; held (false if this is the first grant); clock, now, digits
-- Defines  fence, fence_digits, and list: the slots as text, '-' without permits
local fences, list = 1, '-'
-- include _fence.lua
if not held then call('DEL', grants, details, slots) end -- expired grants may have left them
if limit ~= '0' then
  local taken = {}
  for index = 1, tonumber(weight) do
    taken[index] = held and call('BITPOS', slots, '0') or index - 1
    call('SETBIT', slots, taken[index], '1')
  end
  list = table.concat(taken, ',')
end
-- include _add_shared.lua
