-- Server time in microseconds: `now` as a number, `digits` as text. `clock` is the same, for code in which `now` is the
-- fence that a quorum wants.
local time = call('TIME')
local digits = time[1] .. ('000000'):sub(#time[2] + 1) .. time[2]
local now = tonumber(digits)
local clock = now
