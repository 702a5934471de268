-- uses: claim
-- Make held jobs this worker's. A[2] = epoch, A[3] = jobs, each {id, token}, A[4] = worker id. Answers those that
-- are its own now.
local stands, me = standing(A[2])
local taken = {}
if stands ~= 'good' or me.worker_id ~= A[4] or now - me.beat_at_us > me.lease_us then
  return finish(taken)
end
for _, item in ipairs(A[3]) do
  local r = row(item[1])
  if r and not r.unsound and r.token == item[2] and r.place == 3 and r.lane ~= me.epoch and (r.hops or 0) < MAX_HOPS
    and can_run(me, r.queue, r.tier, r.task)
    and not left_until(me, r.queue, r.tier, r.task, r.slot, math.max(r.created_us or 0, r.due_us or 0)) then
    taken[#taken + 1] = hop(me, r, false)
  end
end
return finish(taken)
