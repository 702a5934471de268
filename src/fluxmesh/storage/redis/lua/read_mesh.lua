-- What workers have told of the mesh. In: epochs. Out: for each {worker id, view, when it told so}; an empty list where
-- there is none. Changes nothing.
local rows = {}
for i, epoch in ipairs(A[2]) do
  local v = redis.pcall('HMGET', K.worker(epoch), 'worker_id', 'mesh', 'mesh_us')
  rows[i] = (v.err or not v[1] or not v[2]) and {} or v
end
return rows
