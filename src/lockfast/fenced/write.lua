-- Run one command on one key, unless the guard has a greater fence.
-- KEYS     1 key, 2 guard (string: the greatest fence seen)
-- ARGV     1 fence, 2 guard ttl in ms ('' for none), 3 command, 4... arguments after the key
-- returns  {1, the command's reply}, or {0, the greatest fence seen} if refused; then nothing is changed
-- If the command fails, its error is raised, but the fence is stored: its holder was here.
-- Fences are below 2^53, so exact in a Lua number.

local newest = redis.call('GET', KEYS[2])
if newest and tonumber(newest) > tonumber(ARGV[1]) then
  return {0, newest}
end
if ARGV[2] == '' then
  redis.call('SET', KEYS[2], ARGV[1])
else
  redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
end
return {1, redis.call(ARGV[3], KEYS[1], unpack(ARGV, 4))}
