-- Lines for the scripts that grant `lock` to `holder`; not a function, which the server would make anew in every run. They
-- need all that a grant is written with (see `_layout.lua`), how many `fences` to reserve, and `now` with its `digits`. They
-- give `fence` and, as text, `fence_digits`. Numbers are written by %.0f: %d has no room for a fence on a server of 32 bits.
--
-- The fence is the time, or as many more than the last as are reserved if that is not less: the clock carries it over a
-- loss of `meta`, and `meta` over a clock that stood still or went back. It is the last of those reserved. Without a
-- `meta`, which may have been lost just now, the first of them is the time: what was given before is less.
local about = ' ' .. holder:sub(1, 6) .. ' ' .. owner
-- The server takes long to write a number out: for a ttl below 10,000 s it need not.
local life = #ttl_ms < 8 and '96400000' or format('%.0f', ttl_ms + 86400000)
call('SET', lock, holder, 'PX', ttl_ms)
local before = call('SET', meta, digits .. about, 'PX', life, 'GET')
local fence, fence_digits = (before and tonumber(before:match('^[1-9]%d*')) or now - 1) + fences, digits
if fence <= now then
  fence = now
else
  fence_digits = format('%.0f', fence)
  call('SET', meta, fence_digits .. about, 'PX', life)
end
