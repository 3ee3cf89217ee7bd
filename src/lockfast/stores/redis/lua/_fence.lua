-- Take the next fence of a lock, and describe its grant in `meta`. Lines, not a function: the server would create the
-- function again in every run.
-- Needs    meta, holder, ttl_ms, owner, fences (how many to reserve), now, digits
-- Defines  fence, and fence_digits as text. %.0f formats them, because %d overflows on a 32-bit server.
--
-- The fence is the last of the reserved ones. It is the server time, or last fence + fences if that is greater: the
-- clock survives the loss of `meta`, and `meta` survives a clock that stops or steps back. Without `meta` the first
-- reserved fence is the server time, so it is greater than the fences before the loss.
local about = ' ' .. holder:sub(1, 6) .. ' ' .. owner
-- Formatting a number is slow, and a ttl below 10,000 s does not need it.
local meta_ttl_ms = #ttl_ms < 8 and '96400000' or format('%.0f', ttl_ms + 86400000)
local before = call('SET', meta, digits .. about, 'PX', meta_ttl_ms, 'GET')
local fence, fence_digits = (before and tonumber(before:match('^[1-9]%d*')) or now - 1) + fences, digits
if fence <= now then
  fence = now
else
  fence_digits = format('%.0f', fence)
  call('SET', meta, fence_digits .. about, 'PX', meta_ttl_ms)
end
