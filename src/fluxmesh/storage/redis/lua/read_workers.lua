-- Workers by epoch. In: epochs. Out: the instant, and for each its record's fields, how many jobs it owns and how
-- many of them are held; an empty list where there is no record. Changes nothing.
local rows = {}
for i, epoch in ipairs(A[2]) do
  local v = redis.pcall('HMGET', K.worker(epoch), 'worker_id', 'registration', 'lease_us', 'beat_us', 'beat_at_us',
    'started_us', 'status', 'fenced', 'dead_how')
  if v.err or not v[1] then
    rows[i] = {}
  else
    local owned = call('ZRANGE', K.in_flight(v[1], epoch), 0, -1)
    local held = 0
    for _, id in ipairs(owned) do
      held = held + (call('ZSCORE', K.held(), id) and 1 or 0)
    end
    v[10], v[11] = #owned, held
    rows[i] = v
  end
end
return {int(now), rows}
