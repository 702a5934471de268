-- Resume a queue, and wake workers for what waits in it. In: queue. Out: 1, or 0 if it was not paused.
-- Of any task: the counters do not tell, and whoever finds nothing waits again.
local queue = A[2]
if call('SREM', K.paused(), queue) == 0 then
  return 0
end
for tier = 0, 3 do
  local n = 0
  for place = 1, 2 do
    n = n + tonumber(call('HGET', K.tally(), queue .. ':' .. tier .. ':' .. place) or 0)
  end
  if n > 0 then
    ready(queue, tier, '', n)
  end
end
return finish(1)
