-- What every verb stands on: its arguments, its instant, records of jobs, moves, and what follows from them.
-- KEYS[1] is the namespace's prefix; ARGV[1] is msgpack: the instant in microseconds (0 = this server's
-- time), then the verb's own arguments, A[2] and so on. A verb returns finish(answer).
-- Places: 0 SCHEDULED 1 READY 2 PARKED 3 HELD 4 RUNNING 5 COMPLETED 6 DEAD_LETTER 7 CANCELLED 8 EXPIRED.
-- Microseconds are below 2^53 and so exact; redis.call writes them in full, text needs int(). Writing a number
-- out costs more than a small command does: on the hot path values are texts, once they are.
-- A record that says `more` has a field beyond those of a plain job (counters, keys, an expiry, hops, notes); of one
-- that does not, the hot path reads only the plain ones.
local call = redis.call
local A = cmsgpack.unpack(ARGV[1])
local now = A[1]
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local ENDED = {[5] = 'COMPLETED', [6] = 'DEAD_LETTER', [7] = 'CANCELLED', [8] = 'EXPIRED'}
local PLACE_OF = {COMPLETED = 5, DEAD_LETTER = 6, CANCELLED = 7, EXPIRED = 8}
local STATUS = {[0] = 'SCHEDULED', 'PENDING', 'PENDING', 'CLAIMED', 'RUNNING', 'COMPLETED', 'DEAD_LETTER',
  'CANCELLED', 'EXPIRED'}
-- In the order of outcome.Charge.
local CHARGES = {'attempts', 'snoozes', 'interruptions', 'crashes'}
local FIELDS, NUMBERS -- of a record, made when a record is first read whole

-- What the verb did so far; finish() draws the conclusions.
local S = {tally = {}, running = {}, groups = {}, failed = 0, ready = {}, order = {}, over = {}, tasks = {}, keys = {},
  stale = 0}

-- A script that fails is not rolled back: what it has begun is carried through, by run() below. So the writes of one
-- job are a function that may be called twice, after all notes about it were made; and what is put off, to be
-- written for many jobs at once, is owed from the start.
local under_way, owed = nil, {}

local function through(writes)
  under_way = writes
  writes()
  under_way = nil
end

local function owe(pay)
  owed[#owed + 1] = pay
end

local function int(n)
  return string.format('%.0f', n)
end

-- The instant as text: redis.call would write the number out anew each time, which is slow.
local NOW = int(now)

-- A whole number as it is stored; nil: there is none, or another hand has spoilt it. tonumber alone takes 'nan',
-- '0x1' and '1e999' too.
local function whole(text)
  return text and #text < 17 and string.find(text, '^%d+$') and tonumber(text) or nil
end

local function instant(us)
  return us == now and NOW or us
end

local function token_after(token)
  return math.max(token + 1, now)
end

-- The first of n fresh arrival numbers.
local function next_seq(n)
  return call('HINCRBY', K.counters(), 'seq', n or 1) - (n or 1) + 1
end

-- What stands in for a field that another hand has spoilt: such a record is `unsound`, but can be moved.
local MUST = {queue = '', task = '', tier = 2, seq = 0}
-- What a field is that is not there: a record holds only what it has to say.
local UNSAID = {token = '0', life = '1', attempts = '0', snoozes = '0', interruptions = '0', crashes = '0'}

local function name_fields()
  FIELDS = {'place', 'queue', 'tier', 'task', 'token', 'seq', 'life', 'attempts', 'snoozes', 'interruptions',
    'crashes', 'lane', 'started_us', 'due_us', 'expires_us', 'worker_id', 'history', 'cancel', 'on_death',
    'hops', 'missed', 'percent', 'message', 'unique_key', 'idempotency_key', 'concurrency_key', 'reason',
    'fingerprint'}
  NUMBERS = {'place', 'tier', 'token', 'seq', 'life', 'attempts', 'snoozes', 'interruptions', 'crashes',
    'started_us', 'due_us', 'expires_us', 'cancel', 'on_death', 'hops', 'missed'}
end

-- The record of a job by which moves are decided; nil: there is no such job, or nobody can say where it is.
local function row(id)
  if not FIELDS then
    name_fields()
  end
  local values = redis.pcall('HMGET', K.job(id), unpack(FIELDS))
  if values.err or not values[1] then
    return nil
  end
  local r = {id = id}
  for i, name in ipairs(FIELDS) do
    r[name] = values[i] or nil
  end
  for name, otherwise in pairs(UNSAID) do
    r[name] = r[name] or otherwise
  end
  for _, name in ipairs(NUMBERS) do
    r[name] = whole(r[name])
  end
  for name, otherwise in pairs(MUST) do
    if r[name] == nil then
      r[name], r.unsound = otherwise, true
    end
  end
  for name, otherwise in pairs(UNSAID) do
    if r[name] == nil then
      r[name], r.unsound = tonumber(otherwise), true
    end
  end
  if not STATUS[r.place] or (r.place >= 2 and r.place <= 4 and not r.lane)
    or (r.place == 2 and not string.find(r.lane, '^%a:%d:[^:]*:')) then
    return nil
  end
  return r
end

-- noting -------------------------------------------------------------------------------------------------
local counted = {} -- queue, tier, place -> field, so that no text is made anew for each job

local function within(list, name)
  local found = list[name]
  if not found then
    found = {}
    list[name] = found
  end
  return found
end

local function count(queue, tier, place, change)
  local of_tier = within(within(counted, queue), tier)
  local field = of_tier[place]
  if not field then
    field = queue .. ':' .. int(tier) .. ':' .. int(place)
    of_tier[place] = field
  end
  S.tally[field] = (S.tally[field] or 0) + change
end

-- Jobs that waiting workers should hear of. task '' = any.
local function ready(queue, tier, task, n)
  local of_task = within(within(S.ready, queue), task)
  local known = of_task[tier]
  if known then
    known.n = known.n + (n or 1)
  else
    local note = {queue = queue, tier = tonumber(tier), task = task, n = n or 1}
    of_task[tier] = note
    S.order[#S.order + 1] = note
  end
end

local function scheduled(due_us, queue, tier, task)
  if not S.due or due_us < S.due.at then
    S.due = {at = due_us, queue = queue, tier = tier, task = task}
  end
end

local function over(id)
  S.over[#S.over + 1] = id
end

-- Permits: how many of a task and of a key run.
local function runs(task, key, change)
  S.running['t:' .. task] = (S.running['t:' .. task] or 0) + change
  if key then
    S.running['k:' .. key] = (S.running['k:' .. key] or 0) + change
  end
end

local function running_of(field)
  return tonumber(call('HGET', K.running(), field) or 0) + (S.running[field] or 0)
end

-- parking sets -------------------------------------------------------------------------------------------
-- A lane is t:<tier>:<queue>:<task> or k:<tier>:<queue>:<key>. A key's lane is shut (not in lanes) only while
-- as many jobs of the key run as its limit allows.
local function lane_parts(lane)
  local kind, tier, queue, ref = string.match(lane, '^(%a):(%d):([^:]*):(.*)$')
  return kind, tonumber(tier), queue, ref
end

local function park_into(lane, id, seq)
  local kind, _, _, ref = lane_parts(lane)
  call('ZADD', K.parked(lane), seq, id)
  call('SADD', K.lanes_of(kind, ref), lane)
  call(kind == 't' and 'SADD' or 'SREM', K.lanes(), lane)
end

local function unpark(lane, ...)
  call('ZREM', K.parked(lane), ...)
  if call('EXISTS', K.parked(lane)) == 0 then
    local kind, _, _, ref = lane_parts(lane)
    call('SREM', K.lanes_of(kind, ref), lane)
    call('SREM', K.lanes(), lane)
  end
end

-- Let a claim of this very step see what a settle before it made free.
local function open_freed()
  for key in pairs(S.keys) do
    local lanes = call('SMEMBERS', K.lanes_of('k', key))
    if #lanes > 0 then
      call('SADD', K.lanes(), unpack(lanes))
    end
  end
end

local function announce_freed()
  for task in pairs(S.tasks) do
    if call('HEXISTS', K.limits(), task) == 1 then
      for _, lane in ipairs(call('SMEMBERS', K.lanes_of('t', task))) do
        local _, tier, queue = lane_parts(lane)
        ready(queue, tier, task)
      end
    end
  end
  open_freed()
  for key in pairs(S.keys) do
    for _, lane in ipairs(call('SMEMBERS', K.lanes_of('k', key))) do
      local _, tier, queue = lane_parts(lane)
      ready(queue, tier, '')
    end
  end
end

-- A running job has left its place, and with it the permits it had.
local function freed(task, key)
  runs(task, key, -1)
  S.announce_freed = announce_freed
  S.tasks[task] = true
  if key then
    S.keys[key] = true
  end
end

-- moves --------------------------------------------------------------------------------------------------
local function is_failed(r)
  return r.reason == 'error' or r.reason == 'timeout'
end

local function flush_groups()
  for fingerprint, change in pairs(S.groups) do
    local left = call('ZINCRBY', K.groups(), change, fingerprint)
    S.groups[fingerprint] = 0
    if tonumber(left) <= 0 then
      call('ZREM', K.groups(), fingerprint)
    end
  end
end

local function flush_counters()
  for _, name in ipairs({'stale', 'failed'}) do
    if S[name] ~= 0 then
      call('HINCRBY', K.counters(), name, S[name])
      S[name] = 0
    end
  end
end

-- What is rarely counted.
local function flush_rare()
  flush_counters()
  flush_groups()
end

-- What the counters make of a move. The change is -1 as it leaves, 1 as it enters.
local function note(r, place, change)
  count(r.queue, r.tier, place, change)
  if place == 6 then
    S.flush_rare = flush_rare
    if r.fingerprint then
      S.groups[r.fingerprint] = (S.groups[r.fingerprint] or 0) + change
    end
    if is_failed(r) then
      S.failed = S.failed + change
    end
  elseif place == 4 and change < 0 then
    freed(r.task, r.concurrency_key)
  end
end

-- Take a job out of the place where it is, with all that hangs on it. Its record is left as it stands.
local function leave(r)
  local at = r.place
  if at == 0 then
    call('ZREM', K.delayed(r.tier), r.id)
  elseif at == 1 then
    call('ZREM', K.ready(r.queue, r.tier), r.id)
  elseif at == 2 then
    unpark(r.lane, r.id)
  elseif at == 3 or at == 4 then
    call('ZREM', K.in_flight(r.worker_id or '', r.lane), r.id)
    if at == 3 then
      call('ZREM', K.held(), r.id)
    end
  elseif at == 6 then
    call('ZREM', K.dlq(), r.id)
    if r.fingerprint then
      call('ZREM', K.group(r.fingerprint), r.id)
    end
  else
    call('ZREM', K.ended(ENDED[at]), r.id)
  end
end

-- Put it into a place that nobody owns. r has its new tier, seq, reason and fingerprint by now.
local function enter(r, to, score)
  if to == 0 then
    call('ZADD', K.delayed(r.tier), score, r.id)
  elseif to == 1 then
    call('ZADD', K.ready(r.queue, r.tier), score, r.id)
  elseif to == 6 then
    call('ZADD', K.dlq(), score, r.id)
    if r.fingerprint then
      call('ZADD', K.group(r.fingerprint), score, r.id)
    end
  else
    call('ZADD', K.ended(ENDED[to]), score, r.id)
  end
end

-- The unique key is held by a job from its creation, or replay, to its end.
local function turn_unique(r, to)
  if not r.unique_key then
    return
  end
  local name = K.unique(r.queue, r.unique_key)
  if to >= 5 then
    if call('GET', name) == r.id then
      call('DEL', name)
    end
  elseif r.place >= 5 then
    call('SET', name, r.id)
  end
end

-- The one move to a place that nobody owns. Of m: token (must), score, tier, seq, life, charge (1-4), fresh (a
-- new life), due_us, ended_us, result, history, error, reason, fingerprint, percent, message, cancel; what is
-- left out is null afterwards, but history, which stays.
local function move(r, to, m)
  local ended = to >= 5
  local set, drop = {'place', to, 'token', m.token, 'more', 1}, {}
  local function put(name, value)
    if value == nil then
      drop[#drop + 1] = name
    else
      set[#set + 1] = name
      set[#set + 1] = value
    end
  end
  put('tier', m.tier or r.tier)
  put('seq', m.seq or r.seq)
  put('life', m.life or r.life)
  for i, name in ipairs(CHARGES) do
    put(name, m.fresh and 0 or r[name] + (m.charge == i and 1 or 0))
  end
  local expires_us = r.expires_us
  if m.fresh or (m.history and not ended) then
    expires_us = nil -- a job expires only before its first start
  end
  put('expires_us', expires_us)
  put('started_us', ended and r.started_us or nil)
  put('worker_id', ended and r.worker_id or nil)
  put('history', m.history or r.history)
  for _, name in ipairs({'due_us', 'ended_us', 'result', 'error', 'reason', 'fingerprint', 'percent', 'message',
    'cancel'}) do
    put(name, m[name])
  end
  for _, name in ipairs({'lane', 'request', 'waiting_for', 'on_death', 'missed'}) do
    drop[#drop + 1] = name
  end
  local moved = {id = r.id, queue = r.queue, tier = m.tier or r.tier, reason = m.reason,
    fingerprint = m.fingerprint}
  note(r, r.place, -1)
  note(moved, to, 1)
  through(function()
    enter(moved, to, m.score)
    call('HSET', K.job(r.id), unpack(set))
    call('HDEL', K.job(r.id), unpack(drop))
    leave(r)
    turn_unique(r, to)
    if r.expires_us and expires_us and to < 4 then
      call('ZADD', K.expires(), expires_us, r.id)
    elseif r.expires_us then
      call('ZREM', K.expires(), r.id)
    end
  end)
end

-- Back to its old place among the ready. m as for move; token must.
local function to_ready(r, m)
  m.score = r.seq
  m.due_us = r.due_us
  move(r, 1, m)
  ready(r.queue, r.tier, r.task)
end

local function to_later(r, due_us, m)
  m.score, m.due_us = due_us, due_us
  move(r, 0, m)
  scheduled(due_us, r.queue, r.tier, r.task)
end

-- An end: to is 5..8.
local function to_end(r, to, m)
  m.score, m.ended_us, m.due_us, m.cancel = now, now, r.due_us, r.cancel
  if to == 5 then
    m.percent = 100
  end
  move(r, to, m)
  over(r.id)
end

-- Replay: ready now, everything counted anew; id, token and history stay.
local function to_new_life(r)
  local seq = next_seq()
  move(r, 1, {token = r.token, seq = seq, score = seq, life = r.life + 1, fresh = true, due_us = now})
  ready(r.queue, r.tier, r.task)
end

-- To another tier, with a new arrival number; of a held job with a new token.
local function to_new_tier(r, tier)
  local token = r.place == 3 and token_after(r.token) or r.token
  local seq = next_seq()
  local m = {token = token, seq = seq, tier = tier, due_us = r.due_us, percent = r.percent, message = r.message}
  if r.place == 0 then
    m.score = r.due_us
    move(r, 0, m)
    scheduled(r.due_us, r.queue, tier, r.task)
  else
    m.score = seq
    move(r, 1, m)
    ready(r.queue, tier, r.task)
  end
end

-- An owned job that was not entered goes back to its place; if it was cancelled, or is past its time, that is
-- its end.
local function give_back(r, token)
  if r.cancel then
    to_end(r, 7, {token = token})
  elseif r.expires_us and r.expires_us <= now then
    to_end(r, 8, {token = token})
  else
    to_ready(r, {token = token, percent = r.percent, message = r.message})
  end
end

-- workers ------------------------------------------------------------------------------------------------
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

local function can_run(me, queue, tier, task)
  return knows(me, task) and me.in_tier[tonumber(tier)] and me.in_queue[queue]
end

-- ending -------------------------------------------------------------------------------------------------
-- A change that was written is forgotten: this may be called again.
local function flush(key, changes)
  for field, change in pairs(changes) do
    local left = change == 0 or call('HINCRBY', key, field, change)
    changes[field] = nil
    if left == 0 then
      call('HDEL', key, field)
    end
  end
end

local function first_due()
  local first
  if call('EXISTS', K.delayed(0), K.delayed(1), K.delayed(2), K.delayed(3)) == 0 then
    return nil
  end
  for tier = 0, 3 do
    local found = call('ZRANGE', K.delayed(tier), 0, 0, 'WITHSCORES')
    local at = found[2] and tonumber(found[2])
    if at and (not first or at < first) then
      first = at
    end
  end
  return first
end

-- Ring min(n, waiting) workers for each (queue, tier, task) with n new jobs.
local function wake()
  local waiting = call('ZRANGE', K.waiting(), 0, -1)
  if #waiting == 0 then
    return
  end
  table.sort(S.order, function(a, b) return a.tier < b.tier end)
  for _, note in ipairs(S.order) do
    local left = note.n
    for i, epoch in ipairs(waiting) do
      if left <= 0 then
        break
      end
      local me = epoch and epoch ~= S.asking and worker(epoch)
      if me and not me.fenced and not me.dead_how and not me.command and me.status == 'ready'
        and me.in_tier[note.tier] and me.in_queue[note.queue] and (note.task == '' or knows(me, note.task)) then
        waiting[i] = false
        left = left - 1
        call('ZREM', K.waiting(), epoch)
        call('PUBLISH', K.bell(epoch), '')
      end
    end
  end
end

-- Write the counters, open what was freed, wake whom it concerns. S.asking: the epoch whose own exchange this
-- is (as text): it need not be woken.
local function finish(answer)
  flush(K.tally(), S.tally)
  flush(K.running(), S.running)
  if S.flush_rare then
    S.flush_rare()
  end
  if S.announce_freed then
    S.announce_freed()
  end
  if S.due then
    local first = first_due()
    if not first or S.due.at <= first then
      ready(S.due.queue, S.due.tier, S.due.task)
    end
  end
  if #S.order > 0 then
    wake()
  end
  for _, id in ipairs(S.over) do
    call('PUBLISH', K.over(id), '')
  end
  return answer
end

-- The answer of a verb. If it fails, the job under way is carried through, and what is owed is written, as far as that
-- can be; then the failure is told.
local function run(verb)
  local good, answer = pcall(verb)
  if good then
    return answer
  end
  -- A server that refuses the first write (memory full, a replica) has changed nothing, and shall not: a write that
  -- changes nothing asks whether it does.
  local refused = redis.pcall('SETRANGE', P, 0, '')
  if type(refused) == 'table' and refused.err then
    error(answer, 0)
  end
  call = redis.pcall
  if under_way then
    pcall(under_way)
  end
  for _, pay in ipairs(owed) do
    pcall(pay)
  end
  pcall(finish)
  error(answer, 0)
end
