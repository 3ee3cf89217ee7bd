-- Run one command on one key, unless a holder with a greater fence has been there.
-- KEYS  1 key, 2 guard (string: the greatest fence seen)
-- ARGV  1 fence, 2 milliseconds for which the guard is kept after this ('' for ever), 3 command, 4... what follows the key
-- Gives {1, the command's reply}, or {0, the greatest fence seen} and changes nothing.
-- A command that fails raises its error; the fence counts all the same, since its holder has been there.
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
