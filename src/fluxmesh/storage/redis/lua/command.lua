-- uses: fleet
-- Ask all runs of a worker id. A[3] = worker id, A[4] = the word, nil takes it back. Answers how many there are.
local n = 0
for _, one in ipairs(all_workers()) do
  local me = one.worker_id == A[3] and worker(one.epoch)
  if me and not me.dead_how then
    if A[4] then
      call('HSET', K.worker(one.epoch), 'command', A[4])
    else
      call('HDEL', K.worker(one.epoch), 'command')
    end
    notice(one.epoch)
    n = n + 1
  end
end
return finish(n)
