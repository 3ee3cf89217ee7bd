-- Set or extend the ttl of a key if it has a given value. May shorten the ttl, since the caller chooses it.
-- KEYS     1 lock
-- ARGV     1 id, 2 milliseconds, 3 'add' to the ttl or 'set' it, 4 'ttl' to reject a key without a ttl, else ''
-- Returns  1 if the ttl was changed; 0 if the key does not exist, has another value or was rejected

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local left = redis.call('PTTL', KEYS[1])
if left < 0 and ARGV[4] == 'ttl' then return 0 end
local wanted = tonumber(ARGV[2])
if ARGV[3] == 'add' then wanted = wanted + math.max(left, 0) end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', wanted))
return 1
