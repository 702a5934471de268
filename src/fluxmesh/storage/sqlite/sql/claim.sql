-- Finding, parking and taking jobs. Inputs in the order of the ? marks.

-- The next jobs of one lane after an arrival number, oldest first: (lane, after, limit) -> the columns of
-- claim.Found but those that the lane implies. The place is spelled out: beside partial indexes on it, SQLite
-- would prepare a statement with a bound place anew each time.
-- :name ready
select rid, id, token, task, payload, options, attempts, crashes, snoozes, interruptions, life, seq, expires_us,
  concurrency_key, concurrency_limit, slot, max(created_us, ifnull(due_us, 0))
  from <job> where place = 1 and lane = ? and pos > ? order by pos limit ?
-- :name parked
select rid, id, token, task, payload, options, attempts, crashes, snoozes, interruptions, life, seq, expires_us,
  concurrency_key, concurrency_limit, slot, max(created_us, ifnull(due_us, 0))
  from <job> where place = 2 and lane = ? and pos > ? order by pos limit ?

-- Parking sets that have something to give.
-- :name open_lanes
select lane, queue, tier, kind, ref from <lane> where n > 0 and open = 1
-- :name paused
select queue from <queue> where paused = 1

-- Permits in use, counted where they are: among the running. The count of a task is taken once a step.
-- :name running_of_task
select count(*) from <job> indexed by <job_place> where place = 4 and task = ?
-- :name running_of_key
select count(*) from <job> where place = 4 and concurrency_key = ?

-- (lane, pos, waiting_for, rid)
-- :name park
update <job> set place = 2, lane = ?, pos = ?, waiting_for = ? where rid = ?
-- A key whose limit is reached: its set stays shut until one of its running jobs ends.
-- :name close_key
insert into <lane> (lane, queue, tier, kind, ref, n, open) values (?, ?, ?, 'k', ?, 0, 0)
  on conflict do update set open = 0

-- (place, lane, pos, token, started_us, worker_id, request, rid)
-- :name take
update <job> set place = ?, lane = ?, pos = ?, token = ?, started_us = ?, worker_id = ?, waiting_for = null,
  hops = null, missed = null, on_death = null, request = ? where rid = ?

-- First due instant of each tier.
-- :name due
select (select pos from <job> where place = 0 and lane = '0' order by pos limit 1),
  (select pos from <job> where place = 0 and lane = '1' order by pos limit 1),
  (select pos from <job> where place = 0 and lane = '2' order by pos limit 1),
  (select pos from <job> where place = 0 and lane = '3' order by pos limit 1)
-- :name due_jobs
select rid, queue, task, slot from <job> where place = 0 and lane = ? and pos <= ? order by pos limit ?
-- (lane, seq, seq, rid)
-- :name promote
update <job> set place = 1, lane = ?, pos = ?, seq = ? where rid = ?
-- Jobs not started in time.
-- :name expired
select id from <job> where expires_us is not null and place < 4 and expires_us <= ? limit ?
