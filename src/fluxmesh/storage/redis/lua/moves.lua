-- Moving jobs from place to place: the sets, the record and the counters change together.

-- rare
local function is_failed(r)
  return r.reason == 'error' or r.reason == 'timeout'
end

-- rare
local function flush_groups()
  for fingerprint, change in pairs(S.groups) do
    local left = call('ZINCRBY', K.groups(), change, fingerprint)
    S.groups[fingerprint] = 0
    if tonumber(left) <= 0 then
      call('ZREM', K.groups(), fingerprint)
    end
  end
end

-- rare
local function flush_counters()
  for _, name in ipairs({'stale', 'failed'}) do
    if S[name] ~= 0 then
      call('HINCRBY', K.counters(), name, S[name])
      S[name] = 0
    end
  end
end

-- What is rarely counted.
-- rare
local function flush_rare()
  flush_counters()
  flush_groups()
end

-- What the counters make of a move. The change is -1 as it leaves, 1 as it enters.
-- rare
local function note(r, place, change)
  count(r.queue, r.tier, place, change)
  if place == 6 then
    S.flush_rare = true
    if r.fingerprint then
      S.groups[r.fingerprint] = (S.groups[r.fingerprint] or 0) + change
    end
    if is_failed(r) then
      S.failed = S.failed + change
    end
  elseif place == 4 and change < 0 then
    freed(r.task, r.concurrency_key, 1)
  end
end

-- Take a job out of the place where it is, with all that hangs on it. Its record is left as it stands.
-- rare
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
-- rare
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
-- rare
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
-- rare
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

-- Have workers hear of a job that waits since then; after a while it is nobody's in particular.
-- rare
local function ready_again(queue, tier, task, slot, since_us)
  if is_kept_apart(since_us) then
    ready(queue, tier, task, 1, slot or false)
  else
    ready(queue, tier, task)
  end
end

-- rare
local function row_ready_again(r, tier)
  ready_again(r.queue, tier, r.task, r.slot, math.max(r.created_us or 0, r.due_us or 0))
end

-- Back to its old place among the ready. m as for move; token must.
-- rare
local function to_ready(r, m)
  m.score = r.seq
  m.due_us = r.due_us
  move(r, 1, m)
  row_ready_again(r, r.tier)
end

-- rare
local function to_later(r, due_us, m)
  m.score, m.due_us = due_us, due_us
  move(r, 0, m)
  scheduled(due_us, r.queue, r.tier, r.task)
end

-- An end: to is 5..8.
-- rare
local function to_end(r, to, m)
  m.score, m.ended_us, m.due_us, m.cancel = now, now, r.due_us, r.cancel
  if to == 5 then
    m.percent = 100
  end
  move(r, to, m)
  over(r.id)
end

-- Replay: ready now, everything counted anew; id, token and history stay.
-- rare
local function to_new_life(r)
  local seq = next_seq()
  move(r, 1, {token = r.token, seq = seq, score = seq, life = r.life + 1, fresh = true, due_us = now})
  ready(r.queue, r.tier, r.task, 1, r.slot or false)
end

-- To another tier, with a new arrival number; of a held job with a new token.
-- rare
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
    row_ready_again(r, tier)
  end
end

-- An owned job that was not entered goes back to its place; if it was cancelled, or is past its time, that is
-- its end.
-- rare
local function give_back(r, token)
  if r.cancel then
    to_end(r, 7, {token = token})
  elseif r.expires_us and r.expires_us <= now then
    to_end(r, 8, {token = token})
  else
    to_ready(r, {token = token, percent = r.percent, message = r.message})
  end
end
