-- Delete a key if it has a given value, like DELIFEQ (Valkey 9) and DELEX ... IFEQ (Redis 8.4).
-- KEYS     1 lock
-- ARGV     1 id
-- Returns  1 if the key was deleted; 0 if it does not exist or has another value

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
