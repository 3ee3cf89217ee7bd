-- Set the time that a plain key still has, or add to it, if it holds a value. May shorten, since it is asked for so.
-- KEYS  1 lock
-- ARGV  1 id, 2 milliseconds, 3 'add' to what is left or 'set' it, 4 'ttl' to refuse a key that has no ttl, else ''
-- Gives 1 when it was done, 0 when the key was not there, another's, or refused.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local left = redis.call('PTTL', KEYS[1])
if left < 0 and ARGV[4] == 'ttl' then return 0 end
local wanted = tonumber(ARGV[2])
if ARGV[3] == 'add' then wanted = wanted + math.max(left, 0) end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', wanted))
return 1
