-- Write a shared grant. Lines, as in `_fence.lua`.
-- Needs    the keys; holder, ttl_ms, owner, weight, limit, list; held (false if this is the first grant); clock,
--          fence_digits
-- The other keys last longer than `lock`, so they end after it; they mean nothing without it.
call('HSET', details, holder, table.concat({fence_digits, weight, limit, list, owner}, ' '))
call('ZADD', grants, format('%.0f', clock + ttl_ms * 1000), holder)
if not held then call('SET', lock, limit == '0' and 'lockfast:read' or 'lockfast:permits', 'PX', ttl_ms) end
if not held or call('PTTL', lock) < tonumber(ttl_ms) then
  local aux_ms = ttl_ms + 10000
  if held then call('PEXPIRE', lock, ttl_ms) end
  call('PEXPIRE', grants, aux_ms)
  call('PEXPIRE', details, aux_ms)
  call('PEXPIRE', slots, aux_ms)
end
