-- The end of a verb: counters are written, what was freed is opened, whom it concerns is woken; or, after a failure,
-- what was begun is carried through.

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
  if call('EXISTS', K.delayed('0'), K.delayed('1'), K.delayed('2'), K.delayed('3')) == 0 then
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

-- Which of the jobs of a wish are meant for this worker: of those that belong to it (only_own), or that it would not
-- leave to another. A slot, false for those without one, or 'any' for those that nobody looked at; nil: none are.
-- rare
local function meant_for(me, wish, only_own)
  local own = own_in(me, wish.queue)
  local strict = own and me.weight >= 1
  if only_own and not own or not only_own and not strict then
    return not only_own and 'any' or nil
  end
  local looked_at = 0
  for slot, n in pairs(wish.slots or {}) do
    looked_at = looked_at + n
    if n > 0 and (only_own and is_among(own, wish.task, slot)
      or not only_own and not is_anothers(me, wish.queue, wish.tier, wish.task, slot)) then
      return slot
    end
  end
  return not only_own and looked_at < wish.n and 'any' or nil
end

-- rare
local function wake_some(waiting, only_own)
  for _, wish in ipairs(S.order) do
    for i, epoch in ipairs(waiting) do
      if wish.n <= 0 then
        break
      end
      local me = epoch and epoch ~= S.asking and worker(epoch)
      local slot
      if me and not me.fenced and not me.dead_how and not me.command and me.status == 'ready'
        and me.in_tier[wish.tier] and me.in_queue[wish.queue] and (wish.task == '' or knows(me, wish.task)) then
        slot = meant_for(me, wish, only_own)
      end
      if slot ~= nil then
        waiting[i] = false
        call('ZREM', K.waiting(), epoch)
        if call('PUBLISH', K.bell(epoch), '') > 0 then -- else nobody hears it: its process is gone, or connects anew
          wish.n = wish.n - 1
          if slot ~= 'any' then
            wish.slots[slot] = wish.slots[slot] - 1
          end
        end
      end
    end
  end
end

-- Ring min(n, waiting) workers for each (queue, tier, task) with n new jobs, those to whom they belong before others.
-- rare
local function wake()
  local waiting = call('ZRANGE', K.waiting(), 0, -1)
  table.sort(S.order, function(a, b) return a.tier < b.tier end)
  local any_own = false
  for _, epoch in ipairs(waiting) do
    local me = epoch ~= S.asking and worker(epoch)
    any_own = any_own or (me and me.weight)
  end
  if any_own then
    wake_some(waiting, true)
  end
  wake_some(waiting, false)
end

-- Write the counters, open what was freed, wake whom it concerns. S.asking: the epoch whose own exchange this
-- is (as text): it need not be woken.
local function finish(answer)
  flush(K.tally(), S.tally)
  flush(K.running(), S.running)
  if S.flush_rare then
    flush_rare()
  end
  if S.freed and (next(S.keys) or not S.unlimited and call('EXISTS', K.limits()) == 1) then
    announce_freed()
  end
  if S.due then
    local first = first_due()
    if not first or S.due.at <= first then
      ready(S.due.queue, S.due.tier, S.due.task)
    end
  end
  if #S.order > 0 and anybody_waits() then
    wake()
  end
  -- Of many ends nobody is told while nobody has ever waited for one: whoever does listens to `awaited` as well.
  if #S.over < 3 or call('PUBSUB', 'NUMSUB', K.awaited())[2] > 0 then
    for _, id in ipairs(S.over) do
      call('PUBLISH', K.over(id), '')
    end
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
