-- uses: fleet
-- Jobs of dead owners. A[3] = limit. Answers {armed, jobs}, a job as {id, token, worker id, epoch, ground, how,
-- started, on_death, task, options, spec, attempts, crashes, snoozes, interruptions}.
local armed = arm()
local found = {}
for _, dead in ipairs(dead_owners(armed)) do
  local left = A[3] - #found
  if left <= 0 then
    break
  end
  for _, id in ipairs(call('ZRANGE', K.in_flight(dead.worker_id, dead.epoch), 0, left - 1)) do
    local v = redis.pcall('HMGET', K.job(id), 'token', 'place', 'on_death', 'task', 'options', 'attempts', 'crashes',
      'snoozes', 'interruptions')
    local function number(i)
      return whole(v[i]) or 0
    end
    if not v.err and v[2] then
      found[#found + 1] = {id, number(1), dead.worker_id, dead.epoch, dead.ground, dead.how, v[2] == '4' and 1 or 0,
        (v[3] == '1' or v[3] == '2') and v[3] or 0, v[4] or '', v[5], call('HGET', K.tasks(), v[4] or ''), number(6), number(7), number(8), number(9)}
    end
  end
end
return finish({armed and 1 or 0, found})
