-- Store jobs, in order. A[2] = queue_cap, A[3] = jobs, each {id, task, queue, tier, payload, options, delay_us,
-- run_at_us, expires_in_us, idempotency_key, payload_hash, unique_key, concurrency_key, concurrency_limit, tags}.
-- Answers per job 1 (created) or {verdict, id, by, status, pruned}.
local queue_cap = A[2]
local rooms, homes, adds, order = {}, {}, {}, {}

-- Members are added set by set, at the end.
local function add(name, score, id)
  local list = adds[name]
  if not list then
    list = {}
    adds[name] = list
    order[#order + 1] = name
  end
  list[#list + 1] = score
  list[#list + 1] = id
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

local function room(queue)
  if not rooms[queue] then
    local fields = {}
    for tier = 0, 3 do
      for place = 0, 2 do
        fields[#fields + 1] = queue .. ':' .. tier .. ':' .. place
      end
    end
    local queued = 0
    for _, n in ipairs(call('HMGET', K.tally(), unpack(fields))) do
      queued = queued + tonumber(n or 0)
    end
    rooms[queue] = queue_cap - queued
  end
  return rooms[queue]
end

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

local function store(job, queue, tier, number)
  local id, task, seq = job[1], job[2], int(number)
  local due_us = job[8]
  if job[7] then
    due_us = now + job[7]
  end
  local later = due_us and due_us > now
  local record = {'place', later and '0' or '1', 'seq', seq, 'rid', seq, 'queue', queue, 'tier', tier, 'task', task,
    'token', '0', 'life', '1', 'attempts', '0', 'snoozes', '0', 'interruptions', '0', 'crashes', '0', 'created_us',
    NOW, 'payload', job[5]}
  local function put(name, value)
    if value ~= nil then
      record[#record + 1] = name
      record[#record + 1] = value
    end
  end
  put('options', job[6])
  put('due_us', due_us)
  put('expires_us', job[9] and now + job[9] or nil)
  put('idempotency_key', job[10])
  put('unique_key', job[12])
  put('concurrency_key', job[13])
  put('concurrency_limit', job[14])
  if job[15] and #job[15] > 0 then
    put('tags', cmsgpack.pack(job[15]))
  end
  call('HSET', K.job(id), unpack(record))
  if job[9] then
    add(K.expires(), now + job[9], id)
  end
  for _, tag in ipairs(job[15] or {}) do
    add(K.by_tag(tag), seq, id)
  end
  add(K.all(), seq, id)
  add(K.by_queue(queue), seq, id)
  add(K.by_task(task), seq, id)
  rooms[queue] = rooms[queue] - 1
  if later then
    add(K.delayed(tier), due_us, id)
    count(queue, tier, 0, 1)
    scheduled(due_us, queue, tier, task)
  else
    add(K.ready(queue, tier), seq, id)
    count(queue, tier, 1, 1)
    ready(queue, tier, task)
  end
  if job[10] or job[12] then
    through(function() write_keys(job, queue) end)
  end
end

local function write_adds()
  for _, name in ipairs(order) do
    call('ZADD', name, unpack(adds[name]))
  end
end

local answers = {}
local seq = next_seq(#A[3])
owe(write_adds)
for i, job in ipairs(A[3]) do
  local queue, tier = home(job)
  local found = known(job, queue)
  if found then
    answers[i] = found
  elseif room(queue) < 1 then
    answers[i] = {'full', job[1], false, false, 0}
  else
    store(job, queue, tier, seq)
    seq = seq + 1
    answers[i] = 1
  end
end
write_adds()
return finish(answers)
