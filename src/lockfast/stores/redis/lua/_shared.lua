-- Shared grants: readers and permits. `_layout.lua` describes the keys.
-- Needs    lock, meta, grants, details, slots, now, digits; they may change from lock to lock

local AUX_MS = 10000 -- see `_add_shared.lua`

local function is_shared(held)
  return held == READ or held == PERMITS
end

local function deadline_in(ttl_ms)
  return format('%.0f', now + ttl_ms * 1000)
end

-- Removals come first, see `_layout.lua`.
local function drop(holder)
  local entry = call('HGET', details, holder)
  call('ZREM', grants, holder)
  call('HDEL', details, holder)
  for slot in (entry or ''):gsub('^%d+ %d+ %d+ (%S*).*', '%1'):gmatch('%d+') do call('SETBIT', slots, slot, '0') end
end

-- Set the ttl of `lock`, and let the keys of its grants last a little longer.
local function keep_lock(ttl_ms)
  call('PEXPIRE', lock, ttl_ms)
  for _, key in ipairs({grants, details, slots}) do call('PEXPIRE', key, ttl_ms + AUX_MS) end
end

-- Let `lock` last as long as the longest shared grant. Returns its value, false if there is none left.
local function fit(held)
  local longest = call('ZREVRANGE', grants, '0', '0', 'WITHSCORES')[2]
  if longest then
    keep_lock(math.ceil((longest - now) / 1000))
    return held
  end
  call('DEL', lock, grants, details, slots)
  return false
end

-- The value of `lock` without expired grants, false if it is free. If the server evicted `grants`, `lock` still keeps
-- others out until it expires.
local function live()
  local held = call('GET', lock)
  if not is_shared(held) then return held end
  local expired = call('ZRANGEBYSCORE', grants, '-inf', digits)
  if #expired == 0 then return held end
  for _, holder in ipairs(expired) do drop(holder) end
  return fit(held)
end

-- Whether a claim that is first is admitted; `held` is the result of live().
local function admitted(held, weight, limit)
  if not held then return true end
  if weight == '0' then return false end
  if limit == '0' then return held == READ end
  local used = held == PERMITS and call('BITCOUNT', slots) or 0
  return used > 0 and used + weight <= tonumber(limit) -- none: the server evicted `slots`
end

-- In how many milliseconds expired grants may let a claim in: -1 if never.
local function free_in(held, limit)
  if held ~= PERMITS or limit == '0' then return call('PTTL', lock) end
  local first = call('ZRANGE', grants, '0', '0', 'WITHSCORES')[2]
  return first and math.max(0, math.ceil((first - now) / 1000)) or call('PTTL', lock)
end

-- Keep a grant at least for that long. `lock` comes first: PEXPIRE needs no memory, see `_layout.lua`.
local function keep_shared(holder, ttl_ms)
  if call('PTTL', lock) < tonumber(ttl_ms) then keep_lock(ttl_ms) end
  local deadline = deadline_in(ttl_ms)
  if (tonumber(call('ZSCORE', grants, holder)) or 0) < tonumber(deadline) then call('ZADD', grants, deadline, holder) end
end

-- Returns the fence and the slots as text.
local function grant_shared(held, holder, ttl_ms, weight, limit, owner, now, digits)
  -- include _grant_shared.lua
  return fence_digits, list
end

-- The reply of a shared grant: the fence, with permits "fence slots".
local function shared_reply(fence_digits, list)
  return list == '-' and tonumber(fence_digits) or fence_digits .. ' ' .. list
end
