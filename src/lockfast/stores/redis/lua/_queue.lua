-- Shared by the scripts that hand a lock on, which include it (see `scripts.py`): who is next, and how it is told. What is
-- written where is in `_layout.lua`.

-- An inbox in braces is a channel of this slot, to be told within its shard; PUBLISH would tell the whole cluster.
local function tell(inbox, message)
  return call(inbox:find('{', 1, true) and 'SPUBLISH' or 'PUBLISH', inbox, message)
end

-- Tell whoever is first in the queue now, and for how long the holder may hold, so that its timer is right. One
-- that does not receive it is dead, and removed. `asker` is alive, and learns by the reply. True when that is done; not
-- if it is at the inbox `but`.
local function tell_next(queue, waiters, ttl_ms, asker, but)
  while true do
    local head = call('ZRANGE', queue, '0', '0')[1]
    if not head or head == asker then return true end
    local turn, inbox = (call('HGET', waiters, head) or ''):match('^(%d+) %d+ %d+ (%S+)')
    if inbox and inbox == but then return false end
    if turn and tell(inbox, format('%s %s next %s', head, turn, ttl_ms)) > 0 then return true end
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
        -- include _grant.lua
        -- Of two inboxes, the one that is told last has its push first, and that is to be the grant. At one inbox all
        -- comes in order, so there the grant goes first: who is next might be granted a greater fence before it is read.
        local told = tell_next(queue, waiters, ttl_ms, asker, inbox)
        if holder == asker or tell(inbox, format('%s %s %s', holder, turn, fence_digits)) > 0 then
          return told or tell_next(queue, waiters, ttl_ms, asker)
        end
        call('DEL', lock)
      end
    end
    holder = call('ZPOPMIN', queue)[1]
  end
end
