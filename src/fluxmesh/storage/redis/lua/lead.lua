-- The housekeeping key. A[2] = holder, A[3] = ttl in microseconds. Answers 1 if it is the holder's.
local v = call('HMGET', K.leader(), 'holder', 'until_us')
local until_us = tonumber(v[2] or 0)
local free = not v[1] or until_us <= now or until_us > now + 10 * A[3]
if not free and v[1] ~= A[2] then
  return finish(0)
end
call('HSET', K.leader(), 'holder', A[2], 'until_us', now + A[3])
return finish(1)
