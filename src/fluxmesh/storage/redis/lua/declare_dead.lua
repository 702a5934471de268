-- uses: fleet
-- Record the proof that this epoch's process is gone. A[3] = worker id, A[4] = epoch, A[5] = how, A[6] = the words of
-- a proof that others may better. Answers 1, or 0 if there is no such record.
local epoch = int(A[4])
local me = worker(epoch)
if not me or me.worker_id ~= A[3] then
  return finish(0) -- in the second case its epoch was given anew, as in beat
end
if A[5] == 'left' and call('EXISTS', K.in_flight(me.worker_id, epoch)) == 0 then
  drop_worker(epoch)
  call('HDEL', K.owners(), epoch)
  return finish(1)
end
if not me.dead_how or me.dead_how == A[6] then
  call('HSET', K.worker(epoch), 'dead_how', A[5])
  call('ZREM', K.waiting(), epoch)
end
call('HDEL', K.worker(epoch), 'mesh', 'mesh_us', 'weight', 'parts')
return finish(1)
