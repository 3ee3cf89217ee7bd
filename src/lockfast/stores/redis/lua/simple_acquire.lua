-- Acquire a lock that consists of one key.
-- KEYS     1 lock
-- ARGV     1 id, 2 ttl_ms
-- Returns  2 if the lock was free and is now acquired; 1 if the id already had it (its ttl is now at least ttl_ms);
--          0 if another id has it

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
