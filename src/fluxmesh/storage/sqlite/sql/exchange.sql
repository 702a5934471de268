-- The hot path around settle, begin and claim. Inputs in the order of the ? marks.

-- What an earlier sending of this request was given and still owns: (lane, request) -> as claim.Found.
-- :name given
select rid, id, token, task, payload, options, attempts, crashes, snoozes, interruptions, life, seq, expires_us,
  concurrency_key, concurrency_limit, slot, max(created_us, ifnull(due_us, 0)), queue, tier, place, lane
  from <job> where place in (3, 4) and lane = ? and request = ?
-- An owned job: (id, token, lane) -> as claim.Found.
-- :name owned
select rid, id, token, task, payload, options, attempts, crashes, snoozes, interruptions, life, seq, expires_us,
  concurrency_key, concurrency_limit, slot, max(created_us, ifnull(due_us, 0)), queue, tier, place, lane
  from <job> where id = ? and token = ? and lane = ? and place in (3, 4)

-- :name wait
update <worker> set waiting = 1 where epoch = ? and waiting = 0
-- :name busy
update <worker> set waiting = 0 where epoch = ? and waiting = 1

-- (lane, pos, now, rid): a held job starts.
-- :name begin
update <job> set place = 4, pos = ?, started_us = ?, missed = null where rid = ?

-- Held jobs of others, with whether their owner donates: for take_held and the hint in the answer.
-- :name any_held
select 1 from <job> where place = 3 limit 1
-- :name held
select j.rid, j.id, j.token, j.task, j.payload, j.options, j.attempts, j.crashes, j.snoozes,
  j.interruptions, j.life, j.seq, j.expires_us, j.concurrency_key, j.concurrency_limit, j.slot,
  max(j.created_us, ifnull(j.due_us, 0)), j.queue, j.tier, j.place, j.lane,
  j.pos, j.hops, w.registration, w.epoch
  from <job> j join <worker> w on w.epoch = cast(j.lane as integer)
  where j.place = 3 and j.lane <> ? order by j.tier, j.pos limit ?

-- (lane, pos, token, started_us, worker_id, hops, place, rid)
-- :name hop
update <job> set lane = ?, pos = ?, token = ?, started_us = ?, worker_id = ?, hops = ?, place = ?,
  missed = null, request = null where rid = ?

-- (percent, message, on_death, rid)
-- :name progress
update <job> set percent = coalesce(?, percent), message = coalesce(?, message),
  on_death = coalesce(?, on_death) where rid = ?

-- The common end, a normal return, touches as little as it can. (id) -> what it must know.
-- :name running
select rid, token, place, lane, queue, tier, task, life, attempts, started_us, worker_id, history,
  concurrency_key from <job> where id = ?
-- (ended, ended, result, history, message, rid)
-- :name complete
update <job> set place = 5, lane = '', pos = ?, attempts = attempts + 1, ended_us = ?, result = ?, history = ?,
  percent = 100, message = coalesce(?, message), error = null, on_death = null, missed = null where rid = ?
