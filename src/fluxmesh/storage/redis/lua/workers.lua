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
      'beat_at_us', 'lease_us', 'beat_us', 'turn', 'request')
    local me = false
    if v[1] and v[2] then
      local seen = cmsgpack.unpack(v[2])
      me = {epoch = name, worker_id = v[1], queues = seen[1], tiers = seen[2], tasks = seen[3], known = {},
        donates = seen[4], in_queue = set_of(seen[1]), in_tier = set_of(seen[2]), fenced = v[3] == '1',
        dead_how = v[4] or nil, command = v[5] or nil, status = v[6], beat_at_us = tonumber(v[7]),
        lease_us = tonumber(v[8]), beat_us = tonumber(v[9]), turn = tonumber(v[10] or 0),
        request = tonumber(v[11] or 0)}
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
