-- What every verb stands on: its arguments, its instant, records of jobs, moves, and what follows from them.
-- KEYS[1] is the namespace's prefix; ARGV[1] is msgpack: the instant in microseconds (0 = this server's
-- time), then the verb's own arguments, A[2] and so on. A verb returns finish(answer).
-- Places: 0 SCHEDULED 1 READY 2 PARKED 3 HELD 4 RUNNING 5 COMPLETED 6 DEAD_LETTER 7 CANCELLED 8 EXPIRED.
-- Microseconds are below 2^53 and so exact; redis.call writes them in full, text needs int(). Writing a number
-- out costs more than a small command does: on the hot path values are texts, once they are.
-- A record that says `more` has a field beyond those of a plain job (counters, keys, an expiry, hops, notes); of one
-- that does not, the hot path reads only the plain ones. Of one that has only the slot of its key beyond them `more` is
-- 's' and the slot: then nothing else has to be read.
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
-- rare
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
  return string.format('%d', n)
end

-- The instant as text: redis.call would write the number out anew each time, which is slow.
local NOW = int(now)

-- A whole number as it is stored; nil: there is none, or another hand has spoilt it. tonumber alone takes 'nan',
-- '0x1' and '1e999' too.
local function whole(text)
  return text and #text < 17 and string.find(text, '^%d+$') and tonumber(text) or nil
end

local function token_after(token)
  return math.max(token + 1, now)
end

-- The first of n fresh arrival numbers.
local function next_seq(n)
  return call('HINCRBY', K.counters(), 'seq', n or 1) - (n or 1) + 1
end

local STRICT_US, NOBODYS_AFTER_US = 30000000, 5000000

-- The slot of a job's key as it is stored; nil: it has none, or another hand has spoilt it.
-- rare
local function slot_in(text)
  local slot = text and whole(text)
  return slot and slot < 4096 and slot or nil
end

-- When a job became ready, of the texts of its created_us and due_us.
-- rare
local function ready_since(created_us, due_us)
  return math.max(whole(created_us) or 0, due_us and whole(due_us) or 0)
end

-- Whether a job that became ready then is kept for its owner still, at full weight.
-- rare
local function is_kept_apart(since_us)
  return now >= since_us and now - since_us < STRICT_US
end

-- What stands in for a field that another hand has spoilt: such a record is `unsound`, but can be moved.
-- rare
local MUST = {queue = '', task = '', tier = 2, seq = 0}
-- What a field is that is not there: a record holds only what it has to say.
-- rare
local UNSAID = {token = '0', life = '1', attempts = '0', snoozes = '0', interruptions = '0', crashes = '0'}

-- rare
local function name_fields()
  FIELDS = {'place', 'queue', 'tier', 'task', 'token', 'seq', 'life', 'attempts', 'snoozes', 'interruptions',
    'crashes', 'lane', 'started_us', 'due_us', 'expires_us', 'worker_id', 'history', 'cancel', 'on_death',
    'hops', 'missed', 'percent', 'message', 'unique_key', 'idempotency_key', 'concurrency_key', 'reason',
    'fingerprint', 'slot', 'created_us'}
  NUMBERS = {'place', 'tier', 'token', 'seq', 'life', 'attempts', 'snoozes', 'interruptions', 'crashes',
    'started_us', 'due_us', 'expires_us', 'cancel', 'on_death', 'hops', 'missed', 'slot', 'created_us'}
end

-- The record of a job by which moves are decided; nil: there is no such job, or nobody can say where it is.
-- rare
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
  if r.slot and r.slot > 4095 then
    r.slot = nil
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
    field = queue .. ':' .. (type(tier) == 'string' and tier or int(tier)) .. ':' .. int(place)
    of_tier[place] = field
  end
  S.tally[field] = (S.tally[field] or 0) + change
end

-- Jobs that waiting workers should hear of. task '' = any. slot: of them all; false: they have none; nil: nobody
-- looked.
local function ready(queue, tier, task, n, slot)
  local of_task = within(within(S.ready, queue), task)
  local known = of_task[tier]
  if known then
    known.n = known.n + (n or 1)
  else
    known = {queue = queue, tier = tonumber(tier), task = task, n = n or 1, slots = nil}
    of_task[tier] = known
    S.order[#S.order + 1] = known
  end
  if slot ~= nil then
    known.slots = known.slots or {}
    known.slots[slot] = (known.slots[slot] or 0) + (n or 1)
  end
end

-- rare
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

-- rare
local function running_of(field)
  return tonumber(call('HGET', K.running(), field) or 0) + (S.running[field] or 0)
end

-- parking sets -------------------------------------------------------------------------------------------
-- A lane is t:<tier>:<queue>:<task> or k:<tier>:<queue>:<key>. A key's lane is shut (not in lanes) only while
-- as many jobs of the key run as its limit allows.
-- rare
local function lane_parts(lane)
  local kind, tier, queue, ref = string.match(lane, '^(%a):(%d):([^:]*):(.*)$')
  return kind, tonumber(tier), queue, ref
end

-- rare
local function park_into(lane, id, seq)
  local kind, _, _, ref = lane_parts(lane)
  call('ZADD', K.parked(lane), seq, id)
  call('SADD', K.lanes_of(kind, ref), lane)
  call(kind == 't' and 'SADD' or 'SREM', K.lanes(), lane)
end

-- rare
local function unpark(lane, ...)
  call('ZREM', K.parked(lane), ...)
  if call('EXISTS', K.parked(lane)) == 0 then
    local kind, _, _, ref = lane_parts(lane)
    call('SREM', K.lanes_of(kind, ref), lane)
    call('SREM', K.lanes(), lane)
  end
end

-- Let a claim of this very step see what a settle before it made free.
-- rare
local function open_freed()
  for key in pairs(S.keys) do
    local lanes = call('SMEMBERS', K.lanes_of('k', key))
    if #lanes > 0 then
      call('SADD', K.lanes(), unpack(lanes))
    end
  end
end

-- rare
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

-- So many running jobs have left their place, and with it the permits they had.
local function freed(task, key, n)
  runs(task, key, -n)
  S.freed = true
  S.tasks[task] = true
  if key then
    S.keys[key] = true
  end
end
