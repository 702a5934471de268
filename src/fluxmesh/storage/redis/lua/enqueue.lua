-- Store jobs, in order. A[2] = queue_cap, A[3] = jobs, each {id, task, queue, tier, payload, options, delay_us,
-- run_at_us, expires_in_us, idempotency_key, payload_hash, unique_key, concurrency_key, concurrency_limit, tags,
-- slot, true}; of a plain job the first six.
-- Answers per job 1 (created) or {verdict, id, by, status, pruned}.
local queue_cap = A[2]
local TIER = {[0] = '0', '1', '2', '3'}
local rooms, homes, adds = {}, {}, {}
local alike, kinds, last = {}, {}, nil

-- Members are added set by set, at the end. Jobs that are alike (of one queue, tier and task, ready all or later all)
-- go to the same sets.
local function kind_of(queue, tier, task, later)
  local kind = last
  if kind and kind.queue == queue and kind.tier == tier and kind.task == task and kind.later == later then
    return kind
  end
  local known = within(within(within(alike, queue), tier), task)
  kind = known[later]
  if not kind then
    kind = {queue = queue, tier = tier, task = task, later = later, n = 0, counted = 0, slots = nil,
      slotted = 0}
    known[later] = kind
    kinds[#kinds + 1] = kind
  end
  last = kind
  return kind
end

-- rare
local function list(name)
  local found = adds[name]
  if not found then
    found = {n = 0}
    adds[name] = found
  end
  return found
end

local function add(to, score, id)
  local n = to.n
  to[n + 1], to[n + 2], to.n = score, id, n + 2
end

local function home(job)
  local queue, tier = job[3], job[4]
  if queue and tier then
    return queue, tier
  end
  local default = homes[job[2]]
  if not default then
    local spec = call('HGET', K.tasks(), job[2])
    spec = spec and cmsgpack.unpack(spec) or {}
    default = {spec[2] or 'default', spec[3] or 2}
    homes[job[2]] = default
  end
  return queue or default[1], tier or default[2]
end

local function status_of(id)
  local place = redis.pcall('HGET', K.job(id), 'place')
  return type(place) == 'string' and STATUS[whole(place)]
end

-- rare
local function known_key(job)
  local found = call('HMGET', K.idempotency(job[10]), 'payload_hash', 'job_id', 'status', 'forget_us')
  if not found[2] or (found[4] and tonumber(found[4]) <= now) then
    return nil
  end
  if found[1] ~= job[11] then
    return {'conflict', found[2], 'idempotency', false, 0}
  end
  local status = status_of(found[2])
  if not status then
    return {'existing', found[2], 'idempotency', found[3] or 'COMPLETED', 1}
  end
  return {'existing', found[2], 'idempotency', status, 0}
end

local function known(job, queue)
  local status = status_of(job[1])
  if status then
    return {'existing', job[1], 'id', status, 0}
  end
  local found = job[10] and known_key(job)
  if found then
    return found
  end
  local holder = job[12] and call('GET', K.unique(queue, job[12]))
  if holder then
    return {'existing', holder, 'unique', status_of(holder) or 'PENDING', 0}
  end
end

-- How many jobs of the queue have not been taken yet; or, if those that are listed leave room enough, how many
-- there are at most.
local function queued(queue)
  local listed = call('ZCARD', K.by_queue(queue))
  if listed + #A[3] <= queue_cap then
    return listed
  end
  local fields, sum = {}, 0
  for tier = 0, 3 do
    for place = 0, 2 do
      fields[#fields + 1] = queue .. ':' .. tier .. ':' .. place
    end
  end
  for _, n in ipairs(call('HMGET', K.tally(), unpack(fields))) do
    sum = sum + tonumber(n or 0)
  end
  return sum
end

local function room(queue)
  local found = rooms[queue]
  if not found then
    found = {left = queue_cap - queued(queue)}
    rooms[queue] = found
  end
  return found
end

-- What only some jobs have; `more` with it if any of it has to be looked at when the job is claimed or ends.
local NOTHING = {}

local function extras(job, due_us)
  -- Not #job: it may stop at any field that is nil, as queue and tier are where the task decides.
  if not (job[6] or job[17]) then
    return NOTHING
  end
  local found, more = {}, job[9] or job[12] or job[13]
  local function put(name, value)
    if value ~= nil then
      found[#found + 1] = name
      found[#found + 1] = value
    end
  end
  put('options', job[6])
  put('due_us', due_us)
  put('expires_us', job[9] and now + job[9] or nil)
  put('idempotency_key', job[10])
  put('unique_key', job[12])
  put('concurrency_key', job[13])
  put('concurrency_limit', job[14])
  put('slot', job[16] and int(job[16]) or nil)
  put('tags', job[15] and #job[15] > 0 and cmsgpack.pack(job[15]) or nil)
  put('more', more and '1' or job[16] and 's' .. int(job[16]) or nil)
  return found
end

-- rare
local function write_keys(job, queue)
  if job[10] then
    call('DEL', K.idempotency(job[10]))
    call('ZREM', K.forget(), job[10])
    call('HSET', K.idempotency(job[10]), 'payload_hash', job[11], 'job_id', job[1])
  end
  if job[12] then
    call('SET', K.unique(queue, job[12]), job[1])
  end
end

-- What hangs on a job that is not a plain one.
local function hang_on(job, kind, seq, queue)
  local id = job[1]
  if job[9] then
    add(list(K.expires()), now + job[9], id)
  end
  if job[15] then
    for _, tag in ipairs(job[15]) do
      add(list(K.by_tag(tag)), seq, id)
    end
  end
  if job[16] and not kind.later then
    kind.slots = kind.slots or {}
    kind.slots[job[16]] = (kind.slots[job[16]] or 0) + 1
    kind.slotted = kind.slotted + 1
  end
  if job[10] or job[12] then
    through(function() write_keys(job, queue) end)
  end
end

local function store(job, home_room, queue, tier, number)
  local id, task, seq = job[1], job[2], int(number)
  local due_us = job[7] and now + job[7] or job[8]
  local later = due_us ~= nil and due_us > now
  call('HSET', K.job(id), 'place', later and '0' or '1', 'task', task, 'payload', job[5], 'queue', queue, 'tier',
    TIER[tier], 'seq', seq, 'created_us', NOW, unpack(extras(job, due_us)))
  local kind = kind_of(queue, tier, task, later)
  add(kind, seq, id)
  home_room.left = home_room.left - 1
  if later then
    add(list(K.delayed(tier)), due_us, id)
    scheduled(due_us, queue, tier, task)
  end
  if job[17] then
    hang_on(job, kind, seq, queue)
  end
end

local function note_kind(kind)
  local n = kind.n / 2 - kind.counted
  kind.counted = kind.counted + n
  if n > 0 then
    count(kind.queue, kind.tier, kind.later and 0 or 1, n)
    if not kind.later then
      for slot, of_slot in pairs(kind.slots or {}) do
        ready(kind.queue, kind.tier, kind.task, of_slot, slot)
      end
      if n > kind.slotted then
        ready(kind.queue, kind.tier, kind.task, n - kind.slotted, false)
      end
      kind.slots, kind.slotted = nil, 0
    end
  end
end

local function write_adds()
  for _, kind in ipairs(kinds) do
    note_kind(kind)
  end
  for _, kind in ipairs(kinds) do
    if not kind.later then
      call('ZADD', K.ready(kind.queue, kind.tier), unpack(kind, 1, kind.n))
    end
    call('ZADD', K.all(), unpack(kind, 1, kind.n))
    call('ZADD', K.by_queue(kind.queue), unpack(kind, 1, kind.n))
    call('ZADD', K.by_task(kind.task), unpack(kind, 1, kind.n))
  end
  for name, members in pairs(adds) do
    if members.n > 0 then
      call('ZADD', name, unpack(members, 1, members.n))
    end
  end
end

local answers = {}
local seq = next_seq(#A[3])
owe(write_adds)
for i, job in ipairs(A[3]) do
  local queue, tier = home(job)
  local found = known(job, queue)
  local home_room = room(queue)
  if found then
    answers[i] = found
  elseif home_room.left < 1 then
    answers[i] = {'full', job[1], false, false, 0}
  else
    store(job, home_room, queue, tier, seq)
    seq = seq + 1
    answers[i] = 1
  end
end
write_adds()
return finish(answers)
