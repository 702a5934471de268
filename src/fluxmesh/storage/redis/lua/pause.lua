-- uses: sound
-- Pause a queue. In: queue. Out: 1, or 0 if it was paused already.
-- Ready jobs stay where they are: claim passes paused queues by. Held ones go back, also when the call is repeated;
-- they are few (workers x buffer), whatever the queue holds.
local queue = A[2]
local new = call('SADD', K.paused(), queue)
for _, id in ipairs(call('ZRANGE', K.held(), 0, -1)) do
  local r = sound_row(id)
  if r and r.place == 3 and r.queue == queue then
    give_back(r, token_after(r.token))
  end
end
return finish(new)
