-- Delete a key if it holds a value: the command that Valkey 9 has as DELIFEQ and Redis 8.4 as DELEX ... IFEQ.
-- KEYS  1 lock
-- ARGV  1 id
-- Gives 1 when it was deleted, 0 when it was not there or another's.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
