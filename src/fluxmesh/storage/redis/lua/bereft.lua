-- Jobs of dead owners.

-- At most so many, each {id, token, worker id, epoch, ground, how, started, on_death, task, options, spec, attempts,
-- crashes, snoozes, interruptions}.
local function list_orphans(limit, armed)
  local found = {}
  for _, dead in ipairs(dead_owners(armed)) do
    local left = limit - #found
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
          (v[3] == '1' or v[3] == '2') and v[3] or 0, v[4] or '', v[5], call('HGET', K.tasks(), v[4] or ''), number(6),
          number(7), number(8), number(9)}
      end
    end
  end
  return found
end

-- Microseconds until the first lease of the living lapses if it is not renewed; false: nobody lives.
local function next_lapse_us()
  local first
  for _, one in ipairs(all_workers()) do
    local me = worker(one.epoch)
    local at = me and not me.dead_how and me.beat_at_us + me.lease_us
    if at and at >= now and (not first or at < first) then
      first = at
    end
  end
  return first and first - now or false
end

-- {armed, jobs, next lapse}
local function look_for_orphans(limit)
  note_longest()
  local armed = arm()
  return {armed and 1 or 0, list_orphans(limit, armed), next_lapse_us()}
end
