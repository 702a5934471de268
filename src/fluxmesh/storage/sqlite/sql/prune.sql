-- Deleting what is over. Inputs in the order of the ? marks. Invariants
--   * What is deleted has ended, or belongs to nobody: no statement touches a job that has not ended.
--   * Jobs are found by their place, oldest first, at most so many a call. The other tables are small.

-- (place, ended before, limit) -> jobs that are over
-- :name doomed
select rid, id, queue, tier, place, ended_us, idempotency_key, options from <job> indexed by <job_place>
  where place = ? and lane = '' and pos < ? order by pos limit ?
-- (status, forget_us, key, job id): the key outlives its job
-- :name keep_key
update <idempotency> set status = ?, forget_us = ? where key = ? and job_id = ?
-- (now, limit)
-- :name forget_keys
delete from <idempotency> where key in (select key from <idempotency> indexed by <idempotency_forget>
  where forget_us is not null and forget_us <= ? limit ?)

-- (now)
-- :name waiters
delete from <waiter> where until_us <= ?
-- :name listeners
delete from <listener> where until_us <= ?

-- (now, silent since, limit): dead or fenced for a lease, or silent for very long, and owning nothing
-- :name workers
select epoch, bell, lock from <worker> w
  where (((dead_how is not null or fenced = 1) and beat_wall_us + lease_us <= ?) or beat_wall_us < ?)
  and not exists (select 1 from <job> indexed by <job_place> where place in (3, 4) and lane = cast(w.epoch as text))
  limit ?
-- :name drop_worker
delete from <worker> where epoch = ?
-- :name mesh
delete from <mesh> where epoch not in (select epoch from <worker>)
-- :name affinity
delete from <affinity> where epoch not in (select epoch from <worker>)
-- (name, name): is a bell or lock named by a worker that stays?
-- :name is_named
select 1 from <worker> where bell = ? or lock = ? limit 1
-- :name missing
delete from <missing> where not exists
  (select 1 from <job> indexed by <job_place> where place in (3, 4) and lane = cast(epoch as text))

-- Counters and parking sets of nothing.
-- :name tallies
delete from <tally> where n = 0
-- :name lanes
delete from <lane> where n = 0
-- (now, limit): tasks that were registered before every worker there is, that no job names, and whose rate
-- limit has nothing left to remember
-- :name tasks
delete from <task> where task in (select task from <task> t
  where epoch < (select coalesce(min(epoch), 9223372036854775807) from <worker>) and tat_us <= ?
  and not exists (select 1 from <job> j indexed by <job_task> where j.task = t.task) limit ?)
