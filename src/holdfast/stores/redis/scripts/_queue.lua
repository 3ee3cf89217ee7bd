-- Shared by the scripts that hand a lock on, which include it (see `scripts.py`): who is next, and how it is told. What is
-- written where is in `_grant.lua`.

-- An inbox in braces is a channel of this slot, to be told within its shard; PUBLISH would tell the whole cluster.
local function tell(inbox, message)
  return call(inbox:find('{', 1, true) and 'SPUBLISH' or 'PUBLISH', inbox, message)
end

-- Tell whoever is first in the queue now, and for how long the holder may hold, so that its timer is right. One
-- that does not receive it is dead, and removed.
local function tell_next(queue, waiters, ttl_ms)
  while true do
    local head = call('ZRANGE', queue, '0', '0')[1]
    if not head then return end
    local turn, inbox = (call('HGET', waiters, head) or ''):match('^(%d+) %d+ %d+ (%S+)')
    if turn and tell(inbox, format('%s %s next %s', head, turn, ttl_ms)) > 0 then return end
    call('ZREM', queue, head)
    call('HDEL', waiters, head)
  end
end

-- Give a free lock to the first who is alive, beginning with `holder`, which was taken from the queue already. PUBLISH
-- tells how many received it: nobody means a dead waiter. `asker` is alive, since it asks; it learns by the reply and needs
-- no push.
local function hand_over(lock, meta, queue, waiters, asker, holder, now, digits)
  while holder do
    local entry = call('HGET', waiters, holder)
    call('HDEL', waiters, holder)
    if entry then
      local turn, ttl_ms, dead_at, inbox, fences, owner = entry:match('^(%d+) (%d+) (%d+) (%S+) (%d+) (.*)$')
      if holder == asker or tonumber(dead_at) * 1000 > now then
        -- include _granting.lua
        tell_next(queue, waiters, ttl_ms) -- first, since what a server is told to push last goes out first
        if holder == asker or tell(inbox, format('%s %s %s', holder, turn, fence_digits)) > 0 then return end
        call('DEL', lock)
      end
    end
    holder = call('ZPOPMIN', queue)[1]
  end
end
