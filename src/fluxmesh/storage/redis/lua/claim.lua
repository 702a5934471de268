-- Who gets what: strict tiers, queues of a tier in turns, arrival order inside a queue. A walk over the ready
-- jobs and the parking sets of one worker's own tasks; a job met that it may not run is parked on the spot, one
-- past its time is expired.
local CLAIM_BYTES = 16 * 1024 * 1024 -- payloads of one answer
local AHEAD_BYTES = 1024 * 1024 -- payloads of jobs that were passed by for the sake of own ones
local WINDOW, OTHERS_MOST = 63, 1000 -- candidates beyond the first; jobs of others that are walked past
local PARK_CAP, PASSED_OVER_MOST, MAX_HOPS, TAKEABLE_US = 1000, 100, 2, 100000
local NO_WORKER, RATE = 'a worker for its task', 'its rate limit'
local CONCURRENT, KEY = 'a free place under max_concurrent', 'its concurrency key'
local PLACE_TEXT = {'1', '2'}
local ONLY_SLOT = 115 -- 's'
local TIER_TEXT = {[0] = '0', '1', '2', '3'}

-- rare
local function load_limits()
  local limits, any = {}, false
  local found = call('HGETALL', K.limits())
  for i = 1, #found, 2 do
    local l = cmsgpack.unpack(found[i + 1])
    limits[found[i]] = {count = l[1], period_us = l[2], interval_us = l[3], most = l[4]}
    any = true
  end
  return limits, any
end

local function new_claim(me, request)
  if next(S.keys) then
    open_freed()
  end
  local c = {me = me, request = int(request), more = false, left_behind = false, budget = PARK_CAP, shut = {},
    paused = {}, limits = {}, limited = false, lanes = {}, takes = {}, n_takes = 0, holds = {}, unexpiring = {},
    gone = {}, order = {}, alike = {n = 0}}
  if call('EXISTS', K.paused(), K.limits(), K.lanes()) == 0 then
    S.unlimited = true
    return c
  end
  c.paused = set_of(call('SMEMBERS', K.paused()))
  c.limits, c.limited = load_limits()
  for _, lane in ipairs(call('SMEMBERS', K.lanes())) do
    local kind, tier, queue, ref = lane_parts(lane)
    local home = tier .. ':' .. queue
    c.any_lanes = true
    c.lanes[home] = c.lanes[home] or {}
    table.insert(c.lanes[home], {lane = lane, kind = kind, ref = ref})
  end
  return c
end

-- Rate limits, as limits.py has them -----------------------------------------------------------------------
-- rare
local function standing_tat(limit, task)
  if not limit.tat then
    limit.tat = tonumber(call('HGET', K.tat(), task) or 0)
  end
  if limit.tat - now > 2 * limit.period_us then
    return now
  end
  return math.max(limit.tat, now)
end

-- rare
local function permits(limit, task)
  local backlog_us = standing_tat(limit, task) - now
  return math.max(0, math.floor((limit.count * limit.interval_us - backlog_us) / limit.interval_us))
end

-- rare
local function spend(c)
  c.budget = c.budget - 1
  if c.budget <= 0 then
    c.more = true
  end
end

-- Why no job of this task may start now; nil: one may.
-- rare
local function block(c, task)
  local limit = c.limits[task]
  if not limit then
    return nil
  end
  if limit.most > 0 and running_of('t:' .. task) >= limit.most then
    return CONCURRENT
  end
  if limit.count > 0 and permits(limit, task) < 1 then
    local at = math.ceil(limit.tat + limit.interval_us - limit.count * limit.interval_us)
    c.next_look_us = math.min(c.next_look_us or at, at)
    return RATE
  end
end

-- rare
local function park(c, found, lane, reason)
  spend(c)
  if found.place == 2 and found.lane == lane then
    c.shut[lane] = true -- all behind it wait for the same
    return
  end
  local seq = found.seq or call('ZSCORE', found.key, found.id)
  count(found.queue, found.tier, found.place, -1)
  count(found.queue, found.tier, 2, 1)
  through(function()
    park_into(lane, found.id, seq)
    call('HSET', K.job(found.id), 'place', 2, 'lane', lane, 'waiting_for', reason)
    if found.place == 2 then
      unpark(found.lane, found.id)
    else
      call('ZREM', found.key, found.id)
    end
  end)
end

-- What a claim reads of a record: place, token, task, payload, options, more, if it is asked for when it became ready
-- created_us and due_us, and of one that has more: attempts,
-- crashes, snoozes, interruptions, life, expires_us, concurrency_key, concurrency_limit, hops, slot.
local function read_claimable(name, dated)
  local v = dated and redis.pcall('HMGET', name, 'place', 'token', 'task', 'payload', 'options', 'more', 'created_us',
    'due_us') or redis.pcall('HMGET', name, 'place', 'token', 'task', 'payload', 'options', 'more')
  if not v.err and v[6] and string.byte(v[6]) == ONLY_SLOT then
    v.slot = slot_in(string.sub(v[6], 2))
  elseif not v.err and v[6] then
    v.more = call('HMGET', name, 'attempts', 'crashes', 'snoozes', 'interruptions', 'life', 'expires_us',
      'concurrency_key', 'concurrency_limit', 'hops', 'slot')
    v.slot = slot_in(v.more[10])
  end
  return v
end

-- rare
local function is_sound(v)
  if not (v[3] and v[4]) or (v[2] and not whole(v[2])) then
    return false
  end
  for i = 1, v.more and 5 or 0 do
    if v.more[i] and not whole(v.more[i]) then
      return false
    end
  end
  return true
end

-- A job whose record another hand has spoilt is a dead letter; what has no record, or stands elsewhere, only
-- leaves the set in which it was met.
-- rare
local function bury(c, found, v)
  spend(c)
  call('ZREM', found.key, found.id)
  local elsewhere = not v.err and whole(v[1])
  if v.err or call('EXISTS', K.job(found.id)) == 0 or (STATUS[elsewhere] and elsewhere ~= found.place) then
    if not elsewhere then
      count(found.queue, found.tier, found.place, -1)
    end
    return
  end
  call('HSET', K.job(found.id), 'place', found.place, 'queue', found.queue, 'tier', found.tier, 'task', v[3] or '',
    'lane', found.lane or '', 'payload', v[4] or '')
  local r = row(found.id)
  to_end(r, 6, {token = token_after(r.token), reason = 'undecodable', percent = r.percent, message = r.message})
end

-- Read the record of a job that was met, and judge it.
local function may_run(c, found)
  local name = K.job(found.id)
  local v = read_claimable(name, found.dated)
  local sound = not v.err and v[1] == PLACE_TEXT[found.place] and v[3] and v[4]
  if not sound or ((v.more or v[2]) and not is_sound(v)) then
    bury(c, found, v)
    return false
  end
  local task, key = v[3], v.more and v.more[7]
  local expires_us = v.more and whole(v.more[6])
  if expires_us and expires_us <= now then
    spend(c)
    local r = row(found.id)
    to_end(r, 8, {token = r.token})
    return false
  end
  local reason = not knows(c.me, task) and NO_WORKER or c.limited and block(c, task)
  if reason then
    park(c, found, 't:' .. found.tier .. ':' .. found.queue .. ':' .. task, reason)
    return false
  end
  if key and running_of('k:' .. key) >= (whole(v.more[8]) or 1) then
    local lane = 'k:' .. found.tier .. ':' .. found.queue .. ':' .. key
    call('SREM', K.lanes(), lane)
    park(c, found, lane, KEY)
    return false
  end
  found.name, found.task, found.v, found.concurrency_key = name, task, v, key or nil
  found.limited = key or c.limits[task]
  return true
end

-- Walks: functions that give the next job, or nil ---------------------------------------------------------
-- The ready jobs of a queue that has no parking sets to look at. What it gives is one table, filled anew for each job;
-- their arrival numbers are not read, which costs as much as reading their records.
local function ready_walk(name, queue, tier, want)
  local chunk = math.max(2, math.min(want + 1, 257))
  local found = {id = '', place = 1, key = name, queue = queue, tier = tier, name = '', task = '', v = '',
    concurrency_key = nil, limited = nil}
  local buffer, at, size, after = {}, 0, chunk, '-inf'
  return function()
    if at == #buffer then
      if size < chunk then
        return nil
      end
      -- Go on after the last of them that is still in the set: those behind it were taken out.
      for i = at, 1, -1 do
        local seq = call('ZSCORE', name, buffer[i])
        if seq then
          after = '(' .. seq
          break
        end
      end
      buffer = call('ZRANGEBYSCORE', name, after, '+inf', 'LIMIT', '0', chunk)
      at, size = 0, #buffer
      if size == 0 then
        return nil
      end
    end
    at = at + 1
    found.id = buffer[at]
    return found
  end
end

-- rare
local function lane_walk(c, place, lane, name, queue, tier, want)
  local chunk = tostring(math.max(2, math.min(want + 1, 257)))
  local buffer, at, after, last = {}, 1, '-inf', false
  return function()
    if lane and c.shut[lane] then
      return nil
    end
    if at > #buffer then
      if last then
        return nil
      end
      buffer = call('ZRANGEBYSCORE', name, after, '+inf', 'WITHSCORES', 'LIMIT', '0', chunk)
      last, at = #buffer < 2 * tonumber(chunk), 1
      if #buffer == 0 then
        return nil
      end
      after = '(' .. buffer[#buffer]
    end
    at = at + 2
    return {id = buffer[at - 2], seq = buffer[at - 1], place = place, lane = lane, key = name,
      queue = queue, tier = tier}
  end
end

-- The next of several walks by arrival.
-- rare
local function merge(walks)
  local heads = {}
  local function draw(i)
    local found = walks[i]()
    if found then
      found.arrival = tonumber(found.seq)
    end
    heads[i] = found or false
  end
  for i in ipairs(walks) do
    draw(i)
  end
  return function()
    local best
    for i, head in ipairs(heads) do
      if head and (not best or head.arrival < heads[best].arrival) then
        best = i
      end
    end
    if not best then
      return nil
    end
    local found = heads[best]
    draw(best)
    return found
  end
end

-- rare
local function lanes_walk(c, lanes, tier, queue, want)
  local walks = {lane_walk(c, 1, nil, K.ready(queue, tier), queue, tier, want)}
  for _, l in ipairs(lanes) do
    if not c.shut[l.lane] and (l.kind == 'k' or (knows(c.me, l.ref) and not block(c, l.ref))) then
      walks[#walks + 1] = lane_walk(c, 2, l.lane, K.parked(l.lane), queue, tier, want)
    end
  end
  return #walks == 1 and walks[1] or merge(walks)
end

-- What follows is for a worker to whom jobs of the queue belong. Its jobs are tables of their own: some are kept.
-- rare
local function kept_walk(c, lanes, name, queue, tier, want)
  if lanes then
    local walk = lanes_walk(c, lanes, tier, queue, want)
    return function()
      local found = walk()
      if found then
        found.dated = true
      end
      return found
    end
  end
  local walk = ready_walk(name, queue, tier, want)
  return function()
    local found = walk()
    return found and {id = found.id, place = 1, key = name, queue = queue, tier = tier, dated = true}
  end
end

-- Whether a job is left to another worker, to whom it belongs. Notes when that ends.
-- rare
local function is_left(c, found)
  local v = redis.pcall('HMGET', K.job(found.id), 'task', 'slot', 'created_us', 'due_us')
  local at = not v.err and v[1]
    and left_until(c.me, found.queue, found.tier, v[1], slot_in(v[2]), ready_since(v[3], v[4]))
  if at then
    c.next_look_us = math.min(c.next_look_us or at, at)
  end
  return at
end

-- rare
local function is_own(own, found)
  local v = found.v
  local since_us = ready_since(v[7], v[8])
  return now < since_us or now - since_us > NOBODYS_AFTER_US
    or is_among(own, found.task, v.slot)
end

-- Of the next jobs, as far as the window goes, the first own one, else the first.
-- rare
local function own_walk(c, own, lanes, name, queue, tier, want)
  local window = c.any_will_do and 1 or 1 + math.floor(WINDOW * c.me.weight)
  local walk = kept_walk(c, lanes, name, queue, tier, want + window - 1)
  local strict, others, ended = c.me.weight >= 1, 0, false
  local passed, first, size, bytes = {}, 1, 0, 0

  local function next_runnable()
    while not c.more and others < OTHERS_MOST do
      local found = walk()
      if not found then
        return nil
      end
      if strict and is_left(c, found) then
        others = others + 1
      elseif may_run(c, found) then
        return found
      end
    end
  end

  return function()
    while not ended and size < window and bytes <= AHEAD_BYTES do
      local found = next_runnable()
      if not found then
        ended = true
      elseif is_own(own, found) then
        return found
      else
        passed[first + size] = found
        size, bytes = size + 1, bytes + #found.v[4]
      end
    end
    while size > 0 do
      local found = passed[first]
      passed[first] = nil
      first, size, bytes = first + 1, size - 1, bytes - #found.v[4]
      -- The permits that there were may be used up since.
      if not found.limited or may_run(c, found) then
        return found
      end
    end
  end
end

local function queue_walk(c, tier, queue, name, want)
  local lanes = c.any_lanes and c.lanes[tier .. ':' .. queue]
  local own = c.me.weight and (c.me.weight >= 1 or not c.any_will_do) and own_in(c.me, queue)
  if own then
    return own_walk(c, own, lanes, name, queue, tier, want)
  end
  local walk = lanes and lanes_walk(c, lanes, tier, queue, want) or ready_walk(name, queue, tier, want)
  return function()
    while not c.more do
      local found = walk()
      if not found then
        return nil
      end
      if may_run(c, found) then
        return found
      end
    end
  end
end

local function tier_walk(c, tier, queues, want)
  local walks, turn = {}, 0
  for _, queue in ipairs(queues) do
    local name = K.ready(queue, TIER_TEXT[tier])
    if (c.any_lanes and c.lanes[tier .. ':' .. queue]) or call('EXISTS', name) == 1 then
      walks[#walks + 1] = queue_walk(c, tier, queue, name, want)
    end
  end
  return function()
    while #walks > 0 and not c.more do
      turn = turn % #walks + 1
      local found = walks[turn]()
      if found then
        return found
      end
      table.remove(walks, turn)
      turn = turn - 1
    end
  end
end

-- Jobs this worker could start now, best first. Ends early with c.more when parking is used up.
local function runnable(c, tiers, want)
  local open = {}
  for _, queue in ipairs(c.me.queues) do
    if not c.paused[queue] then
      open[#open + 1] = queue
    end
  end
  local queues = {}
  for i = 1, #open do
    queues[i] = open[(c.me.turn + i - 1) % #open + 1]
  end
  local at, walk = 0, nil
  return function()
    while #queues > 0 and not c.more do
      if not walk then
        at = at + 1
        if not tiers[at] then
          return nil
        end
        walk = tier_walk(c, tiers[at], queues, want)
      end
      local found = walk()
      if found then
        return found
      end
      walk = nil
    end
  end
end

-- Whether a job of a higher tier than this is ready that this worker could run; also if the look at them was cut short
-- by parking, for then nobody knows.
-- rare
local function outranks(c, tier)
  if not c.best and (c.empty_below or 0) < tier then
    local tiers = {}
    for _, better in ipairs(c.me.tiers) do
      if better >= (c.empty_below or 0) and better < tier then
        tiers[#tiers + 1] = better
      end
    end
    c.any_will_do = true
    local found = runnable(c, tiers, 1)()
    c.any_will_do = false
    if found then
      c.best = found.tier
    elseif not c.more then
      c.empty_below = tier
    end
  end
  return c.more or (c.best and c.best < tier)
end

-- Taking ---------------------------------------------------------------------------------------------------
-- What a new owner is told: id, token, task, queue, tier, payload, options, and of a record with more: attempts,
-- crashes, snoozes, interruptions, life, hops, slot. hops: how often it has changed hands since it was claimed.
local function claimed(id, token, queue, tier, v, hops)
  local told = {id, token, v[3], queue, tier, v[4], v[5]}
  if v[6] then
    local more = v.more or {}
    for i = 1, 5 do
      told[7 + i] = more[i] or false
    end
    told[13], told[14] = hops or false, v.slot or false
  end
  return told
end

-- rare
local function spend_permit(c, task)
  local limit = c.limits[task]
  if limit and limit.count > 0 then
    limit.tat = standing_tat(limit, task) + limit.interval_us
    call('HSET', K.tat(), task, limit.tat)
  end
end

-- Whether no limit keeps a held job of this task from its start. It was registered since, for a limited job is never
-- held; if one may start, its permit is used.
-- rare
local function may_begin(c, task)
  if not c.limits[task] then
    return true
  end
  if block(c, task) then
    return false
  end
  spend_permit(c, task)
  c.best = nil -- it may have been the permit of what was found there
  return true
end

-- Most jobs of a claim are alike, so what is counted is counted for many of them at once: those alike that were not
-- counted yet.
local function count_alike(c)
  local a = c.alike
  if a.n > 0 then
    local n = a.n
    a.n = 0
    count(a.queue, a.tier, a.place, -n)
    count(a.queue, a.tier, a.to, n)
    if a.to == 4 then
      runs(a.task, nil, n)
    end
  end
end

local function count_take(c, found, to)
  local a = c.alike
  if a.queue ~= found.queue or a.tier ~= found.tier or a.task ~= found.task or a.place ~= found.place or a.to ~= to then
    count_alike(c)
    a.queue, a.tier, a.task, a.place, a.to = found.queue, found.tier, found.task, found.place, to
  end
  a.n = a.n + 1
  if found.limited then
    count_alike(c) -- the next one's limits are held against it
    if found.concurrency_key and to == 4 then
      local key = 'k:' .. found.concurrency_key
      S.running[key] = (S.running[key] or 0) + 1
    end
  end
end

local function take(c, found, running)
  local v, me = found.v, c.me
  local token = v[2] and token_after(tonumber(v[2])) or now
  token = token == now and NOW or int(token)
  if running then
    if c.limited then
      spend_permit(c, found.task)
    end
    call('HSET', found.name, 'place', '4', 'lane', me.epoch, 'token', token, 'worker_id', me.worker_id, 'request',
      c.request, 'started_us', NOW)
    if v.more and v.more[6] then
      c.unexpiring[#c.unexpiring + 1] = found.id
    end
  else
    call('HSET', found.name, 'place', '3', 'lane', me.epoch, 'token', token, 'worker_id', me.worker_id, 'request',
      c.request)
    c.holds[#c.holds + 1] = NOW
    c.holds[#c.holds + 1] = found.id
  end
  local n = c.n_takes
  c.takes[n + 1], c.takes[n + 2], c.n_takes = NOW, found.id, n + 2
  local gone = c.gone[found.key]
  if not gone then
    gone = {lane = found.lane, ids = {}, n = 0}
    c.gone[found.key] = gone
    c.order[#c.order + 1] = found.key
  end
  gone.n = gone.n + 1
  gone.ids[gone.n] = found.id
  count_take(c, found, running and 4 or 3)
  if found.place == 2 or (v.more and v.more[9]) then
    call('HDEL', found.name, 'waiting_for', 'hops')
  end
  return claimed(found.id, token, found.queue, found.tier, v)
end

-- Move what was taken from set to set, for all at once.
local function write_takes(c)
  if c.n_takes == 0 then
    return
  end
  count_alike(c)
  call('ZADD', K.in_flight(c.me.worker_id, c.me.epoch), unpack(c.takes))
  call('HSET', K.owners(), c.me.epoch, c.me.worker_id)
  if #c.holds > 0 then
    call('ZADD', K.held(), unpack(c.holds))
  end
  if #c.unexpiring > 0 then
    call('ZREM', K.expires(), unpack(c.unexpiring))
  end
  for _, name in ipairs(c.order) do
    local gone = c.gone[name]
    if gone.lane then
      unpark(gone.lane, unpack(gone.ids))
    else
      call('ZREM', name, unpack(gone.ids))
    end
  end
end

-- Have others hear of a job that is left to them.
-- rare
local function tell_of(found)
  if anybody_waits() then
    local v = call('HMGET', K.job(found.id), 'slot', 'created_us', 'due_us')
    ready_again(found.queue, found.tier, found.task, slot_in(v[1]), ready_since(v[2], v[3]))
  end
end

-- Up to slots jobs given running, then up to extra held. reserve[t] of the slots are kept for tier t - 1.
local function claim_jobs(c, slots, extra, reserve)
  local running, held, last_held = {}, {}, nil
  local left, passed_over, lacking, bytes, n = slots, 0, 0, 0, 0
  owe(function() write_takes(c) end)
  for _, n in ipairs(reserve) do
    lacking = lacking + n
  end
  for found in runnable(c, c.me.tiers, slots + extra) do
    bytes = bytes + #found.v[4]
    if bytes > CLAIM_BYTES and n + #held > 0 then
      c.more, c.left_behind = true, true
      tell_of(found)
      break
    end
    local own = reserve[found.tier + 1] or 0
    if left > lacking - own then
      n = n + 1
      running[n] = take(c, found, true)
      left = left - 1
      if own > 0 then
        reserve[found.tier + 1] = own - 1
        lacking = lacking - 1
      end
    elseif extra > #held and not found.limited then
      held[#held + 1] = take(c, found, false)
      last_held = {queue = found.queue, tier = found.tier, task = found.task, id = found.id}
    elseif left == 0 and extra <= #held then
      c.left_behind = true
      tell_of(found)
      break
    else
      passed_over = passed_over + 1
      if passed_over >= PASSED_OVER_MOST then
        break
      end
    end
    if left == 0 and extra <= #held and not anybody_waits() then
      break -- the next one is looked at for the sake of those who could have it
    end
  end
  write_takes(c)
  if #running > 0 and #c.me.queues > 1 then
    call('HINCRBY', K.worker(c.me.epoch), 'turn', #running)
  end
  if last_held and not c.left_behind then
    tell_of(last_held)
  end
  return running, held
end

-- What others hold -----------------------------------------------------------------------------------------
-- Held jobs of others that may go to this worker, whatever their age: best tier and oldest first.
-- rare
local function takeable(me)
  local found = {}
  if not me.donates or call('EXISTS', K.held()) == 0 then
    return found
  end
  local ids = call('ZRANGE', K.held(), 0, 1999, 'WITHSCORES')
  for i = 1, #ids, 2 do
    local v = redis.pcall('HMGET', K.job(ids[i]), 'lane', 'queue', 'tier', 'task', 'hops', 'slot', 'created_us',
      'due_us')
    local owner = not v.err and whole(v[1]) and v[1] ~= me.epoch and whole(v[3]) and worker(v[1])
    -- A limit may have been registered since the job was held: such a job waits for its owner.
    if owner and owner.donates and (whole(v[5]) or 0) < MAX_HOPS and can_run(me, v[2], v[3], v[4])
      and call('HEXISTS', K.limits(), v[4]) == 0 then
      local left_us = me.weight and left_until(me, v[2], v[3], v[4], slot_in(v[6]), ready_since(v[7], v[8]))
      found[#found + 1] = {id = ids[i], from = math.max(tonumber(ids[i + 1]) + TAKEABLE_US, left_us or 0),
        tier = tonumber(v[3]), order = i}
    end
  end
  table.sort(found, function(a, b)
    if a.tier ~= b.tier then
      return a.tier < b.tier
    end
    return a.order < b.order
  end)
  return found
end

-- Microseconds until take_held may find something; false: nothing is held that this worker could run.
-- rare
local function next_held_us(me)
  local first
  for _, job in ipairs(takeable(me)) do
    first = math.min(first or job.from, job.from)
  end
  return first and math.max(0, first - now)
end

-- A held job changes its owner, and counts one more hop.
-- rare
local function hop(me, r, running)
  local token, to = token_after(r.token), running and 4 or 3
  count(r.queue, r.tier, 3, -1)
  count(r.queue, r.tier, to, 1)
  if running then
    runs(r.task, r.concurrency_key, 1)
  end
  through(function()
    call('HSET', K.owners(), me.epoch, me.worker_id)
    call('ZADD', K.in_flight(me.worker_id, me.epoch), now, r.id)
    call('HSET', K.job(r.id), 'place', to, 'lane', me.epoch, 'token', token, 'worker_id', me.worker_id, 'hops',
      (r.hops or 0) + 1, 'more', 1)
    call('HDEL', K.job(r.id), 'missed', 'request')
    call('ZREM', K.in_flight(r.worker_id or '', r.lane), r.id)
    if running then
      call('HSET', K.job(r.id), 'started_us', now)
      call('ZREM', K.held(), r.id)
      call('ZREM', K.expires(), r.id)
    else
      call('ZADD', K.held(), now, r.id)
    end
  end)
  return claimed(r.id, int(token), r.queue, r.tier, read_claimable(K.job(r.id)), (r.hops or 0) + 1)
end
