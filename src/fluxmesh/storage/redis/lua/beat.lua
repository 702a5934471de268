-- uses: fleet
-- Renew a lease. A[3] = epoch, A[4] = the worker as put_worker has it, A[5] = its tasks, A[6] = what it believes it
-- owns, each {id, token}; nil: a supervisor's beat. A[7] = the mesh as it sees it, '' = none any more, nil = as before.
-- A[8] = what belongs to it, {weight, parts}, '' = nothing any more, nil = as before. Answers {standing, lost, cancelled,
-- command, the time, whether something belongs to it then}.
local LISTS_MISSED = 2
local epoch, view, owned = int(A[3]), A[4], A[6]
arm()
local me = worker(epoch)
-- A registration that was lost with a primary: its epoch was given anew, to another.
if me and me.worker_id ~= view[1] then
  return finish({'fenced', {}, {}, false, now, false})
end
if me then
  call('HSET', K.worker(epoch), 'beat_at_us', now)
  if owned then
    call('HSET', K.worker(epoch), 'status', view[6], 'running', view[7])
  end
else
  local fenced = false
  for _, one in ipairs(all_workers()) do
    fenced = fenced or (one.worker_id == view[1] and tonumber(one.epoch) > tonumber(epoch))
  end
  put_worker(epoch, view, fenced)
  -- With its record its tasks may have been forgotten: of a machine that slept, say. Newer ones stand.
  put_tasks(epoch, A[5], true)
  call('HDEL', K.missing(), epoch)
end
local stands
stands, me = standing(epoch)
if not owned then
  return finish({stands, {}, {}, false, now, false})
end
if A[7] then
  if A[7] ~= '' and stands == 'good' then
    call('HSET', K.worker(epoch), 'mesh', A[7], 'mesh_us', now)
  else
    call('HDEL', K.worker(epoch), 'mesh', 'mesh_us')
  end
end
local has_affinity = me.weight ~= nil
if A[8] then
  has_affinity = A[8][1] ~= '' and stands == 'good'
  if has_affinity then
    call('HSET', K.worker(epoch), 'weight', A[8][1], 'parts', A[8][2])
  else
    call('HDEL', K.worker(epoch), 'weight', 'parts')
  end
end

local told, stored, lost, cancelled = {}, {}, {}, {}
for _, job in ipairs(owned) do
  told[job[1]] = job[2]
end
-- A job that it was given long ago and does not name in two lists running never reached it: it is given back.
local function compare(id, since_us)
  local v = redis.pcall('HMGET', K.job(id), 'token', 'cancel', 'missed')
  if v.err then
    return -- spoilt by another hand
  end
  local token, missed = whole(v[1]), whole(v[3]) or 0
  stored[id] = token
  if told[id] == token then
    if v[2] then
      cancelled[#cancelled + 1] = id
    end
    if v[3] then
      call('HDEL', K.job(id), 'missed')
    end
  elseif missed + 1 < LISTS_MISSED or math.abs(now - since_us) <= 2 * me.beat_us then
    if not v[3] then
      call('HSET', K.job(id), 'missed', 1, 'more', 1)
    end
  else
    local r = row(id)
    if r then
      give_back(r, token_after(r.token))
    end
  end
end
local mine = call('ZRANGE', K.in_flight(view[1], epoch), 0, -1, 'WITHSCORES')
for i = 1, #mine, 2 do
  compare(mine[i], tonumber(mine[i + 1]))
end
for _, job in ipairs(owned) do
  if stored[job[1]] ~= job[2] then
    lost[#lost + 1] = job[1]
  end
end
return finish({stands, lost, cancelled, me.command or false, now, has_affinity})
