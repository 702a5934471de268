-- The largest groups of dead letters. In: how many. Out: for each its fingerprint, size, the end of the newest, its
-- id, task, reason and error. Changes nothing.
local groups = {}
local found = call('ZREVRANGE', K.groups(), 0, A[2] - 1, 'WITHSCORES')
for i = 1, #found, 2 do
  local newest = call('ZREVRANGE', K.group(found[i]), 0, 0, 'WITHSCORES')
  if newest[1] then
    local seen = redis.pcall('HMGET', K.job(newest[1]), 'task', 'reason', 'error')
    if not seen.err then
      groups[#groups + 1] = {found[i], found[i + 1], newest[2], newest[1], seen[1], seen[2], seen[3]}
    end
  end
end
return groups
