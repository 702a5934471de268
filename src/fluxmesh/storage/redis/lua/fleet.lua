-- Who lives, who is dead and by what ground. A[2] is always the lease that settings name, in microseconds.
local function all_workers()
  local found = call('HGETALL', K.workers())
  local list = {}
  for i = 1, #found, 2 do
    list[#list + 1] = {epoch = found[i], worker_id = found[i + 1]}
  end
  table.sort(list, function(a, b) return tonumber(a.epoch) < tonumber(b.epoch) end)
  return list
end

-- The longest lease and beat of the living.
local function longest()
  local lease_us, beat_us = A[2], 0
  for _, one in ipairs(all_workers()) do
    local me = worker(one.epoch)
    if me and not me.dead_how then
      lease_us = math.max(lease_us, me.lease_us)
      beat_us = math.max(beat_us, me.beat_us)
    end
  end
  return lease_us, beat_us == 0 and lease_us / 3 or beat_us
end

-- The same as it was when somebody last looked at all of them: beats are many, and each of them asks.
local function known_longest()
  local v = call('HMGET', K.counters(), 'longest_lease_us', 'longest_beat_us')
  local lease_us, beat_us = whole(v[1]), whole(v[2])
  if not lease_us or not beat_us then
    return longest()
  end
  return math.max(lease_us, A[2]), beat_us
end

local function note_longest()
  local lease_us, beat_us = longest()
  call('HSET', K.counters(), 'longest_lease_us', int(lease_us), 'longest_beat_us', int(beat_us))
end

-- Note that storage was looked at now; false while no lease may count as lapsed. Nobody looked for more than two
-- beats, or the clock went back: then the owners get one lease from now on.
local function arm()
  local lease_us, beat_us = known_longest()
  local v = call('HMGET', K.counters(), 'fleet_beat_us', 'reap_not_before_us')
  local fleet_us, not_before_us = tonumber(v[1] or 0), tonumber(v[2] or 0)
  local stepped_back = fleet_us > now
  if stepped_back or now - fleet_us > 2 * beat_us then
    local until_us = now + lease_us
    if not stepped_back then
      until_us = math.max(until_us, not_before_us) -- never shortened
    end
    not_before_us = until_us
    call('HSET', K.counters(), 'reap_not_before_us', until_us)
    for _, one in ipairs(all_workers()) do
      local me = worker(one.epoch)
      if me and me.beat_at_us > now then
        call('HSET', K.worker(one.epoch), 'beat_at_us', now)
        me.beat_at_us = now
      end
    end
  end
  call('HSET', K.counters(), 'fleet_beat_us', now)
  return now >= not_before_us
end

-- True if the record was seen missing one lease ago; notes it when it is seen first.
local function long_missing(epoch)
  local seen = tonumber(call('HGET', K.missing(), epoch) or -1)
  if seen < 0 or seen > now then
    call('HSET', K.missing(), epoch, now)
    return false
  end
  local lease_us = longest()
  return now - seen >= lease_us
end

-- Who may own jobs, as HGETALL gives it; whoever is not listed but has a record and jobs is listed again.
local function all_owners()
  local found = call('HGETALL', K.owners())
  local listed = {}
  for i = 1, #found, 2 do
    listed[found[i]] = true
  end
  for _, one in ipairs(all_workers()) do
    if not listed[one.epoch] and call('EXISTS', K.in_flight(one.worker_id, one.epoch)) == 1 then
      call('HSET', K.owners(), one.epoch, one.worker_id)
      found[#found + 1] = one.epoch
      found[#found + 1] = one.worker_id
    end
  end
  return found
end

-- Owners that are dead: list of {epoch, worker_id, ground, how}, and the same by epoch.
local function dead_owners(armed)
  local found = all_owners()
  local list, by_epoch = {}, {}
  for i = 1, #found, 2 do
    local epoch, worker_id = found[i], found[i + 1]
    if call('EXISTS', K.in_flight(worker_id, epoch)) == 0 then
      call('HDEL', K.owners(), epoch)
      call('HDEL', K.missing(), epoch)
    else
      local me = worker(epoch)
      local dead
      if me and me.dead_how then
        dead = {ground = 'death proven', how = me.dead_how}
      elseif me and armed and me.beat_at_us + me.lease_us < now then
        dead = {ground = 'lease lapsed', how = 'its lease lapsed'}
      elseif not me and long_missing(epoch) and armed then
        dead = {ground = 'worker row missing', how = 'its record is missing'}
      end
      if dead then
        dead.epoch, dead.worker_id = epoch, worker_id
        list[#list + 1] = dead
        by_epoch[epoch] = dead
      end
    end
  end
  table.sort(list, function(a, b) return tonumber(a.epoch) < tonumber(b.epoch) end)
  return list, by_epoch
end

local function drop_worker(epoch)
  call('DEL', K.worker(epoch))
  call('HDEL', K.workers(), epoch)
  call('ZREM', K.waiting(), epoch)
end

-- view = {worker_id, registration, me, lease_us, beat_us, status, running}
local function put_worker(epoch, view, fenced)
  call('DEL', K.worker(epoch))
  call('HSET', K.worker(epoch), 'worker_id', view[1], 'registration', view[2], 'me', view[3], 'lease_us', view[4],
    'beat_us', view[5], 'status', view[6], 'running', view[7], 'beat_at_us', now, 'started_us', now, 'fenced',
    fenced and 1 or 0, 'turn', 0)
  call('HSET', K.workers(), epoch, view[1])
  -- One that a beat puts back may be unknown to the counter as well: both were lost with a primary. Given a second
  -- time, it would take its place among the owners, and the jobs of the first holder would be nobody's.
  if (whole(call('HGET', K.counters(), 'epoch')) or 0) < tonumber(epoch) then
    call('HSET', K.counters(), 'epoch', epoch)
  end
  known_workers[epoch] = nil
  note_longest()
end

-- tasks: each {name, spec, limit or nil}. only_missing: those that are known stand.
local function put_tasks(epoch, tasks, only_missing)
  for _, t in ipairs(tasks) do
    if not only_missing or call('HEXISTS', K.tasks(), t[1]) == 0 then
      call('HSET', K.tasks(), t[1], t[2])
      call('HSET', K.task_epochs(), t[1], epoch)
      if t[3] then
        call('HSET', K.limits(), t[1], t[3])
      else
        call('HDEL', K.limits(), t[1])
      end
    end
  end
end
