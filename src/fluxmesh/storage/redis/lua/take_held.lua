-- uses: claim
-- Take jobs that others have held for a while, given running. A[2] = epoch, A[3] = slots, A[4] = worker id. Answers the jobs, and
-- the microseconds until the next may be taken.
local stands, me = standing(A[2])
local taken = {}
if stands ~= 'good' or me.worker_id ~= A[4] or not me.donates or A[3] < 1 or now - me.beat_at_us > me.lease_us then
  return finish({taken, false})
end
local c = new_claim(me, 0)
for _, job in ipairs(takeable(me)) do
  if #taken >= A[3] then
    local v = call('HMGET', K.job(job.id), 'queue', 'task')
    tell_of({id = job.id, queue = v[1], tier = job.tier, task = v[2]})
    break
  end
  if job.from <= now then
    if outranks(c, job.tier) then
      break
    end
    local r = row(job.id)
    if r and r.place == 3 and not r.unsound and not r.concurrency_key
      and not c.paused[r.queue] and not (r.expires_us and r.expires_us <= now) then
      taken[#taken + 1] = hop(me, r, true)
    end
  end
end
if #taken >= A[3] then
  call('ZREM', K.waiting(), me.epoch)
  claim_jobs(c, 0, 0, {}) -- others hear of what is ready as well, which it may have been woken for
end
return finish({taken, #taken < A[3] and next_held_us(me) or false})
