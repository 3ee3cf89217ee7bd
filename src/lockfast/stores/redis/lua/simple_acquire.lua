-- Take a lock that is one plain key, and nothing beside it.
-- KEYS  1 lock
-- ARGV  1 id, 2 ttl_ms
-- Gives 2 when it was free and is the id's now, 1 when it was the id's already (then with at least that ttl), 0 when
-- it is another's.

local held = redis.call('GET', KEYS[1])
if not held then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 2
end
if held ~= ARGV[1] then
  return 0
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
