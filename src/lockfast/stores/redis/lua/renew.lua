-- Renew many grants, each only if its holder still has the lock. Never shortens a ttl: a request with a shorter ttl may
-- arrive after one with a longer ttl, whose reply the holder relies on.
-- KEYS     lock and meta of each grant
-- ARGV     holder and ttl_ms of each grant; then, only if a renewal is final, a text with one digit per grant: 1 for a
--          final renewal, which sets the ttl even if it is shorter, else 0
-- Returns  a list of 1 (renewed) and 0 (the holder does not have the lock)
-- A lock key with other data is nobody's grant, and must not stop the other renewals. But if the account may not read
-- the key, nothing is known about the grants: return the error.
-- Works without free memory. Reads each lock last, after its own write: if the client tracks the keys of this request,
-- the server then reports every later change by somebody else.

local answers = {}
local final = ARGV[#KEYS + 1] or ''
for at = 1, #KEYS, 2 do
  local held = redis.pcall('GET', KEYS[at])
  if type(held) == 'table' and held.err and not held.err:find('WRONGTYPE', 1, true) then
    return held
  end
  if held == ARGV[at] then
    local is_final = final:byte((at + 1) / 2) == 49
    if is_final or redis.call('PTTL', KEYS[at]) < tonumber(ARGV[at + 1]) then
      redis.call('PEXPIRE', KEYS[at], ARGV[at + 1])
    end
    redis.call('PEXPIRE', KEYS[at + 1], ARGV[at + 1] + 86400000)
    redis.call('PTTL', KEYS[at])
    answers[#answers + 1] = 1
  else
    answers[#answers + 1] = 0
  end
end
return answers
