-- What waits in the queues. Out: the instant, the tally, paused queues, and for each (queue, tier) with ready jobs
-- the queue and when the first of them was created and was due. Changes nothing.
local tally = call('HGETALL', K.tally())
local waits = {}
for i = 1, #tally, 2 do
  local queue, tier, place = string.match(tally[i], '^([^:]*):(%d):(%d)$')
  if place == '1' then
    local first = call('ZRANGE', K.ready(queue, tier), 0, 0)[1]
    local seen = first and redis.pcall('HMGET', K.job(first), 'created_us', 'due_us')
    if seen and not seen.err then
      waits[#waits + 1] = {queue, seen[1], seen[2]}
    end
  end
end
return {int(now), tally, call('SMEMBERS', K.paused()), waits}
