-- Notify waiters and hand a free lock off. `_layout.lua` describes the keys.

-- Returns how many clients received the message. An inbox in braces is a sharded channel in the slot of the lock;
-- PUBLISH would send the message to the whole cluster.
local function publish(inbox, message)
  return call(inbox:find('{', 1, true) and 'SPUBLISH' or 'PUBLISH', inbox, message)
end

-- Notify the first waiter, with the ttl of the holder, so that its timer is right. Remove a waiter that does not
-- receive the message: it is dead. `caller` is alive and learns its position from the reply.
-- Returns false, without notifying, if the first waiter uses the inbox `other_than`.
local function notify_first(queue, waiters, ttl_ms, caller, other_than)
  while true do
    local head = call('ZRANGE', queue, '0', '0')[1]
    if not head or head == caller then return true end
    local attempt, inbox = (call('HGET', waiters, head) or ''):match('^(%d+) %d+ %d+ (%S+)')
    if inbox and inbox == other_than then return false end
    if attempt and publish(inbox, format('%s %s next %s', head, attempt, ttl_ms)) > 0 then return true end
    call('ZREM', queue, head)
    call('HDEL', waiters, head)
  end
end

-- Grant a free lock to the first live waiter, starting with `holder`, which was already removed from the queue.
-- A waiter that does not receive its grant is dead, and the next one is tried. `caller` is alive and gets its grant in
-- the reply.
local function hand_off(lock, meta, queue, waiters, caller, holder, now, digits)
  while holder do
    local entry = call('HGET', waiters, holder)
    call('HDEL', waiters, holder)
    if entry then
      local attempt, ttl_ms, dead_at, inbox, fences, owner = entry:match('^(%d+) (%d+) (%d+) (%S+) (%d+) (.*)$')
      if holder == caller or tonumber(dead_at) * 1000 > now then
        -- include _grant.lua
        -- The server writes to the last notified inbox first, and the grant is more urgent, so it is published last.
        -- Messages to one inbox stay in order: there the grant must come first, or the next waiter could be granted a
        -- greater fence before this grant is read.
        local notified = notify_first(queue, waiters, ttl_ms, caller, inbox)
        if holder == caller or publish(inbox, format('%s %s %s', holder, attempt, fence_digits)) > 0 then
          return notified or notify_first(queue, waiters, ttl_ms, caller)
        end
        call('DEL', lock)
      end
    end
    holder = call('ZPOPMIN', queue)[1]
  end
end
