-- uses: claim, due, ends
-- Settle, promote what is due, begin, claim. A[2] = worker id, A[3] = epoch, A[4] = request id, A[5] = settles,
-- each {id, token as text, result or false} of a body that just returned, or {id, token, false, transition as apply
-- has it, percent, message}; A[6] = begins, each {id, token}, A[7] = slots, A[8] = extra, A[9] = reserve by tier.
-- Answers {standing, settled, begun, running, held, more, next due, next held}: letters per item, microseconds
-- from now.
local worker_id, epoch, request = A[2], int(A[3]), A[4]
local in_flight = K.in_flight(worker_id, epoch)
local owned_no_more, ended, uniques = {}, {}, {}
local n_done, n_counted = 0, 0 -- jobs that have completed; of these, those that are counted
local of_queue, of_tier, of_task -- those of the ones that are not
local sound_tier, plain_history = {}, {}
local PLAIN = {life = 1, attempts = 0}
S.asking = epoch

-- What a plain job has nothing of; nil: spoilt by another hand, the slow way knows what to do.
-- rare
local function read_more(name, id, queue)
  local m = call('HMGET', name, 'life', 'attempts', 'history', 'concurrency_key', 'unique_key')
  local r = {id = id, life = whole(m[1] or '1'), attempts = whole(m[2] or '0'), history = m[3], queue = queue,
    concurrency_key = m[4] or nil, unique_key = m[5] or nil}
  return r.life and r.attempts and r
end

-- Most jobs of an exchange are alike, so what is counted is counted for many of them at once.
local function count_done()
  local n = n_done - n_counted
  if n > 0 then
    n_counted = n_done
    count(of_queue, of_tier, 4, -n)
    count(of_queue, of_tier, 5, n)
    freed(of_task, nil, n)
  end
end

-- The history of a plain job that this worker has started then.
local function history_since(started_us)
  local known = plain_history[started_us]
  if not known then
    PLAIN.started_us, PLAIN.worker_id = whole(started_us), worker_id
    known = append_history(PLAIN, 'completed', nil)
    plain_history[started_us] = known
  end
  return known
end

local function is_tier(text)
  local known = sound_tier[text]
  if known == nil then
    known = whole(text) ~= nil
    sound_tier[text] = known
  end
  return known
end

-- A normal return, by far the most common end, touches as little as it can.
local function complete(item)
  local id, result = item[1], item[3]
  local name = K.job(id)
  local v = redis.pcall('HMGET', name, 'place', 'token', 'lane', 'task', 'queue', 'tier', 'started_us', 'more')
  if v.err or v[1] ~= '4' or v[2] ~= item[2] or v[3] ~= epoch or not (v[4] and v[5] and is_tier(v[6])) then
    return false
  end
  local r, attempts, history
  if v[8] and string.byte(v[8]) ~= 115 then -- as in claim: not only a slot
    r = read_more(name, id, v[5])
    if not r then
      return false
    end
    r.started_us, r.worker_id = whole(v[7]), worker_id
    attempts, history = r.attempts + 1, append_history(r, 'completed', nil)
  else
    attempts, history = '1', history_since(v[7])
  end
  if result then
    call('HSET', name, 'place', '5', 'attempts', attempts, 'ended_us', NOW, 'history', history, 'result', result)
  else
    call('HSET', name, 'place', '5', 'attempts', attempts, 'ended_us', NOW, 'history', history)
  end
  if v[5] ~= of_queue or v[6] ~= of_tier or v[4] ~= of_task then
    count_done()
    of_queue, of_tier, of_task = v[5], v[6], v[4]
  end
  n_done = n_done + 1
  owned_no_more[n_done] = id
  ended[2 * n_done - 1], ended[2 * n_done] = NOW, id
  over(id)
  if r then
    if r.unique_key then
      uniques[#uniques + 1] = r
    end
    if r.concurrency_key then
      S.running['k:' .. r.concurrency_key] = (S.running['k:' .. r.concurrency_key] or 0) - 1
      S.keys[r.concurrency_key] = true
    end
    call('HDEL', name, 'error', 'on_death', 'missed')
  end
  return true
end

local COMPLETED = {'COMPLETED', 'completed', 1}

-- rare
local function stale()
  S.flush_rare = true
  S.stale = S.stale + 1
  return 's'
end

local function settle(item)
  if not item[4] and complete(item) then
    return 'a'
  end
  local r = row(item[1])
  if not r or r.token ~= tonumber(item[2]) then
    return stale()
  end
  if r.place == 4 and r.lane == epoch then
    local t = item[4]
    if not t then
      t = COMPLETED
      t[4] = item[3] or nil
    end
    apply(r, t, r.token, item[5], item[6])
    return 'a'
  end
  if r.place == 3 or r.place == 4 then
    return stale()
  end
  return 'd' -- the token was not passed on since: this very settle gave it the place it has now
end

local function write_ended()
  count_done()
  if n_done > 0 then
    call('ZADD', K.ended('COMPLETED'), unpack(ended))
    call('ZREM', in_flight, unpack(owned_no_more))
  end
  for _, holder in ipairs(uniques) do
    turn_unique(holder, 5)
  end
end

local function settle_all()
  local answers = {}
  owe(write_ended)
  for i, item in ipairs(A[5]) do
    answers[i] = settle(item)
  end
  write_ended()
  return table.concat(answers)
end

-- Start a held job, unless a higher tier is ready that this worker could run, or a limit that was registered since
-- keeps it.
-- rare
local function begin(c, item)
  local r = row(item[1])
  if not r or r.token ~= item[2] or r.lane ~= epoch or (r.place ~= 3 and r.place ~= 4) then
    return 'l'
  end
  if r.place == 4 then
    return 'b' -- a repeated request
  end
  if r.expires_us and r.expires_us <= now then
    to_end(r, 8, {token = token_after(r.token)})
    return 'l'
  end
  if c.paused[r.queue] or outranks(c, r.tier) or not may_begin(c, r.task) then
    to_ready(r, {token = token_after(r.token), percent = r.percent, message = r.message})
    return 'o'
  end
  count(r.queue, r.tier, 3, -1)
  count(r.queue, r.tier, 4, 1)
  runs(r.task, r.concurrency_key, 1)
  through(function()
    call('HSET', K.job(r.id), 'place', 4, 'started_us', now)
    call('HDEL', K.job(r.id), 'missed')
    call('ZADD', in_flight, now, r.id)
    call('ZREM', K.held(), r.id)
    call('ZREM', K.expires(), r.id)
  end)
  return 'b'
end

-- What an earlier sending of the same request was given, less what is no longer its own.
-- rare
local function given_before()
  local running, held = {}, {}
  for _, id in ipairs(call('ZRANGE', in_flight, 0, -1)) do
    local r = row(id)
    if r and not r.unsound and whole(call('HGET', K.job(id), 'request')) == request then
      local list = r.place == 4 and running or held
      list[#list + 1] = claimed(id, int(r.token), r.queue, r.tier, read_claimable(K.job(id)))
    end
  end
  if #running + #held > 0 then
    return running, held
  end
end

local settled = settle_all()
local stands, me = standing(epoch)
if me and me.worker_id ~= worker_id then
  stands = 'fenced' -- as in beat
end
if stands ~= 'good' then
  return finish({stands, settled, string.rep('l', #A[6]), {}, {}, 0, false, false})
end
local _, next_us = promote_due(250)
local function from_now(at)
  return at and math.max(0, at - now) or false
end
local slots, extra = A[7], A[8]
if slots + extra == 0 and #A[6] == 0 then
  call('ZREM', K.waiting(), epoch)
  return finish({stands, settled, '', {}, {}, 0, from_now(next_us), false})
end
local c = new_claim(me, request)
local begun, running, held = {}, nil, nil
-- Before anything is given: a request that fails half-way gets the same when it is repeated.
if request > me.request then
  call('HSET', K.worker(epoch), 'request', c.request)
end
if request <= me.request then
  running, held = given_before()
end
for i, item in ipairs(A[6]) do
  begun[i] = begin(c, item)
  if begun[i] ~= 'b' then
    slots = slots + 1 -- it leaves its slot to the claim
  end
end
if not running then
  running, held = claim_jobs(c, slots, extra, A[9])
end
local short = #running < slots
if short then
  call('ZADD', K.waiting(), now, epoch)
elseif anybody_waits() then
  call('ZREM', K.waiting(), epoch)
end
if c.next_look_us then
  next_us = math.min(next_us or c.next_look_us, c.next_look_us)
end
return finish({stands, settled, table.concat(begun), running, held, c.more and 1 or 0, from_now(next_us),
  short and call('EXISTS', K.held()) == 1 and next_held_us(me) or false})
