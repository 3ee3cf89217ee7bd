-- Prolong many grants, each only if it still is its holder's. Never shortens: a request with a shorter ttl may arrive
-- late, after one with a longer ttl whose answer its holder relies on.
-- KEYS  lock and meta of each, in turn
-- ARGV  holder and ttl_ms of each, in turn; then, only if a line is its holder's last word, a text with one digit for
--       each line: 1 for a last word, which sets the end of the grant whatever it was, and 0 for the others
-- Gives a list of 1 (prolonged) and 0 (not the holder's any more).
-- A key that holds other data by now is nobody's grant, and must not stop the renewal of the others; but an account that
-- may not look has not learnt that its grants are gone.
-- Needs no memory. Reads each lock last, after its own write: a server that was asked to track this request tells
-- when somebody else changes the lock (see `watch` in store.py).

local answers = {}
local final = ARGV[#KEYS + 1] or ''
for at = 1, #KEYS, 2 do
  local held = redis.pcall('GET', KEYS[at])
  if type(held) == 'table' and held.err and not held.err:find('WRONGTYPE', 1, true) then
    return held
  end
  if held == ARGV[at] then
    local last_word = final:byte((at + 1) / 2) == 49
    if last_word or redis.call('PTTL', KEYS[at]) < tonumber(ARGV[at + 1]) then
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
