-- uses: sound, dropping
-- Delete what is over and older than it has to be kept. In: the ages (us) at which ended jobs, dead letters and
-- silent workers go, and idempotency keys after the ends of their jobs, the most jobs, the most of anything else.
-- Out: jobs, other things, and 1 if there are more jobs. What is deleted has ended, or belongs to nobody.
local ended_before, dead_before, silent_since, key_ttl = now - A[2], now - A[3], now - A[4], A[5]
local jobs_most, others_most = A[6], A[7]
local jobs, other = 0, 0

-- jobs ---------------------------------------------------------------------------------------------------
local function keep_or_drop_key(r, at)
  local forget = at + key_ttl
  if forget > now then
    call('HSET', K.idempotency(r.idempotency_key), 'status', STATUS[r.place], 'forget_us', int(forget))
    call('ZADD', K.forget(), forget, r.idempotency_key)
  else
    drop_key(r.idempotency_key)
  end
end

-- What stands in the set of an end and has no sound record: nobody can do anything with it any more.
local function drop_unsound(set, id, place)
  call('ZREM', set, id)
  local v = redis.pcall('HMGET', K.job(id), 'place', 'queue', 'task', 'tier')
  local at = not v.err and whole(v[1])
  if at and at ~= place then
    return -- it stands elsewhere by now
  end
  call('DEL', K.job(id))
  call('ZREM', K.all(), id)
  if v[2] then
    call('ZREM', K.by_queue(v[2]), id)
    if whole(v[4]) then
      count(v[2], v[4], place, -1)
    end
  end
  if v[3] then
    call('ZREM', K.by_task(v[3]), id)
  end
end

local function prune_set(set, place, before)
  local found = call('ZRANGEBYSCORE', set, '-inf', '(' .. int(before), 'WITHSCORES', 'LIMIT', 0, jobs_most - jobs)
  for i = 1, #found, 2 do
    local r = sound_row(found[i])
    if r and r.place == place then
      if has_key(r) then
        keep_or_drop_key(r, tonumber(found[i + 1]))
      end
      drop_job(r)
    else
      drop_unsound(set, found[i], place)
    end
    jobs = jobs + 1
  end
end

for _, place in ipairs({5, 6, 7, 8}) do
  if jobs < jobs_most then
    local set = place == 6 and K.dlq() or K.ended(ENDED[place])
    prune_set(set, place, place == 6 and dead_before or ended_before)
  end
end

-- keys whose jobs are gone -------------------------------------------------------------------------------
for _, key in ipairs(call('ZRANGEBYSCORE', K.forget(), '-inf', int(now), 'LIMIT', 0, others_most)) do
  local forget = tonumber(call('HGET', K.idempotency(key), 'forget_us') or nil)
  if forget and forget <= now then
    call('DEL', K.idempotency(key))
  end
  call('ZREM', K.forget(), key)
  other = other + 1
end

-- workers ------------------------------------------------------------------------------------------------
-- One that is dead or fenced is kept for a lease after its last beat: if its process lives after all, it shall
-- hear so, and not find its record missing and put it back.
local function is_gone(v)
  local beat_at, lease = tonumber(v[3]), tonumber(v[4])
  if not beat_at or not lease then
    return true
  end
  return ((v[1] == '1' or v[2]) and beat_at + lease <= now) or beat_at < silent_since
end

local oldest
local workers = call('HGETALL', K.workers())
for i = 1, #workers, 2 do
  local epoch, worker_id = workers[i], workers[i + 1]
  local v = redis.pcall('HMGET', K.worker(epoch), 'fenced', 'dead_how', 'beat_at_us', 'lease_us')
  if other < others_most and (v.err or is_gone(v)) and call('EXISTS', K.in_flight(worker_id, epoch)) == 0 then
    call('DEL', K.worker(epoch))
    call('HDEL', K.workers(), epoch)
    call('HDEL', K.owners(), epoch)
    call('ZREM', K.waiting(), epoch)
    other = other + 1
  elseif not oldest or tonumber(epoch) < oldest then
    oldest = tonumber(epoch)
  end
end

-- Owners without a record, and without jobs by now.
local owners = call('HGETALL', K.owners())
for i = 1, #owners, 2 do
  if call('EXISTS', K.worker(owners[i])) == 0 and call('EXISTS', K.in_flight(owners[i + 1], owners[i])) == 0 then
    call('HDEL', K.owners(), owners[i])
    other = other + 1
  end
end
-- Whoever waits without a record is heard of no more.
for _, epoch in ipairs(call('ZRANGE', K.waiting(), 0, -1)) do
  if call('EXISTS', K.worker(epoch)) == 0 then
    other = other + call('ZREM', K.waiting(), epoch)
  end
end
for _, epoch in ipairs(call('HKEYS', K.missing())) do
  if call('HEXISTS', K.owners(), epoch) == 0 then
    call('HDEL', K.missing(), epoch)
    other = other + 1
  end
end

-- tasks --------------------------------------------------------------------------------------------------
-- Registered before every worker there is, named by no job, and with a rate limit that has nothing left to remember.
local tasks = call('HGETALL', K.task_epochs())
for i = 1, #tasks, 2 do
  local task = tasks[i]
  if other < others_most and (not oldest or tonumber(tasks[i + 1]) < oldest)
    and tonumber(call('HGET', K.tat(), task) or 0) <= now and call('EXISTS', K.by_task(task)) == 0 then
    for _, name in ipairs({K.tasks(), K.task_epochs(), K.limits(), K.tat()}) do
      call('HDEL', name, task)
    end
    other = other + 1
  end
end

return finish({jobs, other, jobs >= jobs_most and 1 or 0})
