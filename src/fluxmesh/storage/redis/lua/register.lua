-- uses: fleet
-- A new epoch. A[3] = the worker as put_worker has it, A[4] = its tasks. Answers the epoch.
local view = A[3]
local epoch = int(call('HINCRBY', K.counters(), 'epoch', 1))
for _, one in ipairs(all_workers()) do
  if one.worker_id == view[1] then
    call('HSET', K.worker(one.epoch), 'fenced', 1)
    call('HDEL', K.worker(one.epoch), 'mesh', 'mesh_us', 'weight', 'parts')
    call('ZREM', K.waiting(), one.epoch)
  end
end
put_worker(epoch, view, false)
put_tasks(epoch, A[4], false)
return finish(tonumber(epoch))
