-- What every write step may need. Inputs in the order of the ? marks.

-- :name seq
select value from <meta> where name = 'seq'
-- :name set_seq
update <meta> set value = ? where name = 'seq'
-- :name add_stale
update <meta> set value = value + ? where name = 'stale'

-- One row a (queue, tier, place) changed by the step.
-- :name tally
insert into <tally> (queue, tier, place, n) values (?, ?, ?, ?)
  on conflict do update set n = n + excluded.n

-- (lane, queue, tier, kind, ref, change)
-- :name lane
insert into <lane> (lane, queue, tier, kind, ref, n) values (?, ?, ?, ?, ?, ?)
  on conflict do update set n = n + excluded.n

-- Workers that wait for work, whoever waited longest first is not tracked: any will do.
-- :name waiting
-- One that drains, retires or was told to be quiet would sleep through its ring.
select epoch, bell from <worker> where waiting = 1 and fenced = 0 and dead_how is null and status = 'ready'
  and command is null
-- :name woken
update <worker> set waiting = 0 where epoch = ?

-- :name lanes_of
select queue, tier, ref from <lane> where kind = ? and ref = ? and n > 0
-- :name open_key
update <lane> set open = 1 where kind = 'k' and ref = ? and open = 0
-- :name close_lane
update <lane> set open = 0 where lane = ?

-- :name limits
select task, spec, tat_us from <task> where limited = 1
-- :name set_tat
update <task> set tat_us = ? where task = ?

-- :name any_waiter
select 1 from <waiter> limit 1
-- :name waiters
select bell from <waiter> where job_id = ?
-- :name drop_waiters
delete from <waiter> where job_id = ?

-- :name worker
select w.worker_id, w.registration, w.fenced, w.dead_how, w.command, w.bell, w.lease_us, a.weight, a.parts
  from <worker> w left join <affinity> a on a.epoch = w.epoch where w.epoch = ?
-- Those to whom jobs belong, if they may come for them: (time since boot)
-- :name owners
select w.epoch, w.registration, a.weight, a.parts from <affinity> a join <worker> w on w.epoch = a.epoch
  where w.fenced = 0 and w.dead_how is null and w.status = 'ready' and w.command is null
  and w.beat_at_us + w.lease_us >= ?

-- One job by id, as the moves need it (columns of step.Row, in order).
-- :name row
select rid, id, place, lane, pos, seq, queue, tier, task, token, life, attempts, crashes, snoozes,
  interruptions, started_us, worker_id, history, cancel, on_death, hops, concurrency_key, due_us, expires_us,
  percent, message, unique_key, idempotency_key, slot, max(created_us, ifnull(due_us, 0)) from <job> where id = ?
-- :name rows_of_owner
select rid, id, place, lane, pos, seq, queue, tier, task, token, life, attempts, crashes, snoozes,
  interruptions, started_us, worker_id, history, cancel, on_death, hops, concurrency_key, due_us, expires_us,
  percent, message, unique_key, idempotency_key, slot, max(created_us, ifnull(due_us, 0)) from <job> where place in (3, 4) and lane = ? limit ?

-- The one statement that ends, returns or delays a job.
-- :name move
update <job> set place = ?, lane = ?, pos = ?, seq = ?, tier = ?, token = ?, life = ?, attempts = ?,
  crashes = ?, snoozes = ?, interruptions = ?, due_us = ?, started_us = ?, ended_us = ?, worker_id = ?,
  result = ?, history = ?, error = ?, reason = ?, fingerprint = ?, percent = ?, message = ?, cancel = ?,
  expires_us = ?, hops = ?, request = null, waiting_for = null, on_death = null, missed = null where rid = ?
