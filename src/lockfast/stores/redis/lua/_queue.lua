-- Notify waiters, and grant from the head of the queue. `_layout.lua` describes the keys.
-- Needs    lock, meta, queue, waiters, now, digits, and `_shared.lua`

local ENTRY = '^(%d+) (%d+) (%d+) (%S+) (%d+) (%d+) (%d+) (.*)$'

-- Returns how many clients received the message. An inbox in braces is a sharded channel in the slot of the lock;
-- PUBLISH would send the message to the whole cluster.
local function publish(inbox, message)
  return call(inbox:find('{', 1, true) and 'SPUBLISH' or 'PUBLISH', inbox, message)
end

local function remove(holder)
  call('ZREM', queue, holder)
  call('HDEL', waiters, holder)
end

-- Notify the first waiter, with the ttl of the holder, so that its timer is right. Remove a waiter that does not
-- receive the message, or whose ticket expired: it is dead. `caller` is alive and learns its position from the reply.
-- Returns false, without notifying, if the first waiter uses the inbox `other_than`.
local function notify_first(ttl_ms, caller, other_than)
  while true do
    local head = call('ZRANGE', queue, '0', '0')[1]
    if not head or head == caller then return true end
    local attempt, dead_at, inbox = (call('HGET', waiters, head) or ''):match('^(%d+) %d+ (%d+) (%S+)')
    local alive = attempt and tonumber(dead_at) * 1000 > now
    if alive and inbox == other_than then return false end
    if alive and publish(inbox, format('%s %s next %s', head, attempt, ttl_ms)) > 0 then return true end
    remove(head)
  end
end

-- Grant an exclusive claim of a waiter. Returns whether the waiter received the grant.
local function grant_waiter(holder, attempt, ttl_ms, inbox, fences, owner, caller)
  call('SET', lock, holder, 'PX', ttl_ms)
  -- include _fence.lua
  -- The server writes to the last notified inbox first, and the grant is more urgent, so it is published last. Messages
  -- to one inbox stay in order: there the grant must come first, or the next waiter could be granted a greater fence
  -- before this grant is read.
  local notified = notify_first(ttl_ms, caller, inbox)
  if holder ~= caller and publish(inbox, format('%s %s %s', holder, attempt, fence_digits)) == 0 then return false end
  if not notified then notify_first(ttl_ms, caller) end
  return true
end

local function grant_shared_waiter(held, holder, attempt, ttl_ms, inbox, weight, limit, owner, caller)
  local fence_digits, list = grant_shared(held, holder, ttl_ms, weight, limit, owner, now, digits)
  local message = format('%s %s %s', holder, attempt, fence_digits)
  if list ~= '-' then message = message .. ' ' .. list end
  return holder == caller or publish(inbox, message) > 0
end

-- Grant from the head of the queue while it is admitted, and remove dead waiters. Then notify the waiter that is first,
-- if `notify` or if there was a grant. `held` is the result of live(). `head`, if given, was already removed from the
-- queue, because the lock is free. `caller` is alive and gets its grant in the reply.
local function serve(held, caller, notify, head)
  while true do
    head = head or (held and call('ZRANGE', queue, '0', '0') or call('ZPOPMIN', queue))[1]
    if not head then return end
    local attempt, ttl_ms, dead_at, inbox, fences, weight, limit, owner =
      (call('HGET', waiters, head) or ''):match(ENTRY)
    if not attempt or (head ~= caller and tonumber(dead_at) * 1000 <= now) then
      remove(head)
    elseif not admitted(held, weight, limit) then
      if head == caller or not notify then return end
      if publish(inbox, format('%s %s next %.0f', head, attempt, free_in(held, limit))) > 0 then return end
      remove(head)
    elseif weight == '0' then
      call('HDEL', waiters, head)
      if grant_waiter(head, attempt, ttl_ms, inbox, fences, owner, caller) then return end
      call('DEL', lock)
    else
      remove(head)
      local received = grant_shared_waiter(held, head, attempt, ttl_ms, inbox, weight, limit, owner, caller)
      held = limit == '0' and READ or PERMITS
      if received then
        notify = true
      else
        drop(head)
        held = fit(held)
      end
    end
    head = nil
  end
end
