-- Reads for doors. Each runs in a short read transaction of its own and changes nothing.
-- Inputs in the order of the ? marks. No statement looks at the whole of <job>: every one goes by an index,
-- and those that walk are read lazily and left at a cap.

-- (id) -> rid
-- :name rid
select rid from <job> where id = ?
-- (rid) -> the columns of rows.Full, in order
-- :name job
select j.id, j.task, j.queue, j.tier, j.place, j.payload, j.options, j.attempts, j.crashes, j.snoozes,
  j.interruptions, j.life, j.token, j.percent, j.message, j.cancel, j.on_death, j.created_us, j.due_us,
  j.expires_us, j.started_us, j.ended_us, j.worker_id, j.waiting_for, j.result, j.error, j.reason,
  j.fingerprint, j.unique_key, j.idempotency_key, j.concurrency_key, j.concurrency_limit, q.paused
  from <job> j left join <queue> q on q.queue = j.queue where j.rid = ?
-- (id) -> history
-- :name history
select history from <job> where id = ?

-- Walks of find, newest first. All give the columns of reads.Met, in order.
-- (rid): jobs created before that one
-- :name walk_all
select rid, place, lane, pos, queue, task, worker_id, created_us from <job> where rid < ? order by rid desc
-- (queue, rid)
-- :name walk_queue
select rid, place, lane, pos, queue, task, worker_id, created_us from <job> indexed by <job_queue>
  where queue = ? and rid < ? order by rid desc
-- (task, rid)
-- :name walk_task
select rid, place, lane, pos, queue, task, worker_id, created_us from <job> indexed by <job_task>
  where task = ? and rid < ? order by rid desc
-- (tag, rid)
-- :name walk_tag
select j.rid, j.place, j.lane, j.pos, j.queue, j.task, j.worker_id, j.created_us
  from <tag> t cross join <job> j on j.rid = t.rid where t.tag = ? and t.rid < ? order by t.rid desc
-- (place, lane, pos, rid): one lane, later ones first
-- :name walk_lane
select rid, place, lane, pos, queue, task, worker_id, created_us from <job> indexed by <job_place>
  where place = ? and lane = ? and (pos, rid) < (?, ?) order by pos desc, rid desc
-- (place, lane, pos, rid): one place, lane by lane
-- :name walk_place
select rid, place, lane, pos, queue, task, worker_id, created_us from <job> indexed by <job_place>
  where place = ? and (lane, pos, rid) < (?, ?, ?) order by lane desc, pos desc, rid desc
-- (place)
-- :name all_of_place
select rid, place, lane, pos, queue, task, worker_id, created_us from <job> indexed by <job_place>
  where place = ?
-- (tag, rid)
-- :name has_tag
select 1 from <tag> where tag = ? and rid = ?

-- :name tally
select queue, tier, place, n from <tally> where n <> 0
-- :name of_place
select coalesce(sum(n), 0) from <tally> where place = ?
-- Dead letters that failed by themselves.
-- :name failed
select count(*) from <job> indexed by <job_reason> where place = 6 and reason in ('error', 'timeout')
-- :name stale
select value from <meta> where name = 'stale'
-- :name paused
select queue from <queue> where paused = 1
-- (lane of ready jobs) -> when its first one was stored, and was due
-- :name first_ready
select created_us, due_us from <job> indexed by <job_place> where place = 1 and lane = ? order by pos limit 1

-- (limit) -> fingerprint, count, end of the newest; the largest groups first
-- :name groups
select fingerprint, count(*), max(pos) from <job> indexed by <job_group>
  where place = 6 and fingerprint is not null group by fingerprint order by 2 desc, 3 desc limit ?
-- (fingerprint) -> the newest of the group
-- :name newest_of_group
select id, task, reason, error from <job> indexed by <job_group>
  where place = 6 and fingerprint = ? order by pos desc limit 1

-- :name boot
select value from <meta> where name = 'boot_id'
-- :name workers
select epoch, worker_id, registration, lease_us, beat_us, beat_at_us, beat_wall_us, boot_id, started_us, status,
  fenced, dead_how from <worker> order by epoch
-- :name mesh
select w.worker_id, m.epoch, m.told_us, m.view from <mesh> m join <worker> w on w.epoch = m.epoch order by m.epoch
-- (lane = epoch) -> held, running
-- :name owned
select place, count(*) from <job> indexed by <job_place> where place in (3, 4) and lane = ? group by place
