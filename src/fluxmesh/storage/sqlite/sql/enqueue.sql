-- Storing new jobs. Inputs in the order of the ? marks.

-- :name insert
insert into <job> (rid, id, place, lane, pos, seq, queue, tier, task, payload, options, created_us, due_us,
  expires_us, unique_key, idempotency_key, concurrency_key, concurrency_limit, slot)
  values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
-- :name tag
insert or ignore into <tag> (tag, rid) values (?, ?)
-- :name by_id
select place from <job> where id = ?
-- :name by_unique
select id, place from <job> where queue = ? and unique_key = ? and place < 5
-- :name by_key
select payload_hash, job_id, status, forget_us from <idempotency> where key = ?
-- :name put_key
insert or replace into <idempotency> (key, payload_hash, job_id) values (?, ?, ?)
-- Not started jobs of a queue: what queue_cap counts.
-- :name queued
select coalesce(sum(n), 0) from <tally> where queue = ? and place <= 2
-- :name spec
select spec from <task> where task = ?
