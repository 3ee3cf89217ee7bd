-- Shared by the scripts that hand a lock on, which include it after _grant.lua: who is next, and how it is told.

-- An inbox in braces is a channel of this slot, to be told within its shard; PUBLISH would tell the whole cluster.
local function tell(inbox, message)
  return call(inbox:find('{', 1, true) and 'SPUBLISH' or 'PUBLISH', inbox, message)
end

-- Tell whoever is first in the queue now, and for how long the holder may hold, so that its timer is right. One
-- that does not receive it is dead, and removed.
local function tell_next(queue, waiters, ttl_ms)
  while true do
    local head = call('ZRANGE', queue, 0, 0)[1]
    if not head then return end
    local turn, inbox = (call('HGET', waiters, head) or ''):match('^(%d+) %d+ %d+ (%S+)')
    if turn and tell(inbox, format('%s %s next %s', head, turn, ttl_ms)) > 0 then return end
    call('ZREM', queue, head)
    call('HDEL', waiters, head)
  end
end

-- Give a free lock to the first who is alive, beginning with `head`, which was taken from the queue already. PUBLISH tells
-- how many received it: nobody means a dead waiter. `asker` is alive, since it asks; it learns by the reply and needs no
-- push.
local function hand_over(lock, meta, queue, waiters, asker, head, now, digits)
  while head do
    local entry = call('HGET', waiters, head)
    call('HDEL', waiters, head)
    if entry then
      local turn, ttl_ms, dead_at, inbox, fences, owner = entry:match('^(%d+) (%d+) (%d+) (%S+) (%d+) (.*)$')
      if head == asker or tonumber(dead_at) * 1000 > now then
        local fence = grant(lock, meta, head, ttl_ms, owner, now, digits, fences)
        if head == asker or tell(inbox, format('%s %s %.0f', head, turn, fence)) > 0 then
          return tell_next(queue, waiters, ttl_ms)
        end
        call('DEL', lock)
      end
    end
    head = call('ZPOPMIN', queue)[1]
  end
end
