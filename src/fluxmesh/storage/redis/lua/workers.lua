-- Workers as storage knows them, and what each can run.

local known_workers = {}

local function set_of(list)
  local set = {}
  for _, value in ipairs(list) do
    set[value] = true
  end
  return set
end

-- Whether a worker has this task. Its tasks are one text, '\0a\0b\0': they may be many, and few are asked for.
local function knows(me, task)
  local known = me.known[task]
  if known == nil then
    known = string.find(me.tasks, '\0' .. task .. '\0', 1, true) ~= nil
    me.known[task] = known
  end
  return known
end

-- A registered worker, ready to be asked what it can run; nil: no record.
local function worker(epoch)
  local name = int(epoch)
  if known_workers[name] == nil then
    local v = call('HMGET', K.worker(name), 'worker_id', 'me', 'fenced', 'dead_how', 'command', 'status',
      'beat_at_us', 'lease_us', 'beat_us', 'turn', 'request', 'weight')
    local me = false
    if v[1] and v[2] then
      local seen = cmsgpack.unpack(v[2])
      me = {epoch = name, worker_id = v[1], queues = seen[1], tiers = seen[2], tasks = seen[3], known = {},
        donates = seen[4], in_queue = set_of(seen[1]), in_tier = set_of(seen[2]), fenced = v[3] == '1',
        dead_how = v[4] or nil, command = v[5] or nil, status = v[6], beat_at_us = tonumber(v[7]),
        lease_us = tonumber(v[8]), beat_us = tonumber(v[9]), turn = tonumber(v[10] or 0),
        request = tonumber(v[11] or 0), weight = v[12] and tonumber(v[12]) or nil}
    end
    known_workers[name] = me
  end
  return known_workers[name] or nil
end

-- GOOD, UNKNOWN or FENCED as values.Standing has them, and the worker.
local function standing(epoch)
  local me = worker(epoch)
  if not me then
    return 'unknown', nil
  end
  return (me.fenced or me.dead_how) and 'fenced' or 'good', me
end

-- Own work ---------------------------------------------------------------------------------------------------
-- What belongs to a worker in a queue: list of {slots, tasks}; nil: nothing does.
-- rare
local function own_in(me, queue)
  if not me.weight then
    return nil
  end
  if not me.own then
    me.own = {}
    local text = call('HGET', K.worker(me.epoch), 'parts')
    for _, part in ipairs(text and cmsgpack.unpack(text) or {}) do
      for _, name in ipairs(part[1]) do
        me.own[name] = me.own[name] or {}
        table.insert(me.own[name], {slots = part[2], tasks = part[3]})
      end
    end
  end
  return me.own[queue]
end

-- Whether a job is among these. slot nil: it has none.
-- rare
local function is_among(own, task, slot)
  for _, part in ipairs(own) do
    if not slot then
      if string.find(part.tasks, '\0' .. task .. '\0', 1, true) then
        return true
      end
    else
      local byte = string.byte(part.slots, math.floor(slot / 8) + 1)
      if math.floor(byte / 2 ^ (7 - slot % 8)) % 2 == 1 then
        return true
      end
    end
  end
  return false
end

-- Whether a worker may come for what belongs to it.
-- rare
local function comes(me)
  return not me.fenced and not me.dead_how and not me.command and me.status == 'ready'
    and now - me.beat_at_us <= me.lease_us
end

local comers

-- Whether a job belongs to another living worker of good standing that can run it, and this one, of full weight, leaves
-- it to it.
-- rare
local function is_anothers(me, queue, tier, task, slot)
  local own = me.weight and me.weight >= 1 and own_in(me, queue)
  if not own or is_among(own, task, slot) then
    return false
  end
  if not comers then
    comers = {}
    for _, epoch in ipairs(call('HKEYS', K.workers())) do
      local other = worker(epoch)
      if other and other.weight and comes(other) then
        comers[#comers + 1] = other
      end
    end
  end
  for _, other in ipairs(comers) do
    local theirs = other.epoch ~= me.epoch and own_in(other, queue)
    if theirs and is_among(theirs, task, slot) and knows(other, task) and other.in_tier[tonumber(tier)]
      and other.in_queue[queue] then
      return true
    end
  end
  return false
end

-- Until when a job that became ready then is left to another, to whom it belongs; nil: this worker may have it.
-- rare
local function left_until(me, queue, tier, task, slot, since_us)
  return is_kept_apart(since_us) and is_anothers(me, queue, tier, task, slot) and since_us + STRICT_US or nil
end

-- Have a worker beat at once: the answer will tell it something.
local function notice(epoch)
  call('PUBLISH', K.bell(epoch), 'notice')
end

local waits

-- Whether any worker was waiting for work when this was first asked.
local function anybody_waits()
  if waits == nil then
    waits = call('EXISTS', K.waiting()) == 1
  end
  return waits
end

-- rare
local function can_run(me, queue, tier, task)
  return knows(me, task) and me.in_tier[tonumber(tier)] and me.in_queue[queue]
end
