-- What operators do to jobs and queues. Inputs in the order of the ? marks.
-- The moves themselves, with their counters, are those of step.sql.

-- Level-triggered: the owner hears of it with every beat until the life ends.
-- :name flag_cancel
update <job> set cancel = 1 where rid = ?

-- (queue, unique key) -> the live job that holds the key
-- :name holder
select 1 from <job> where queue = ? and unique_key = ? and place < 5

-- (tier, seq, rid): a running job runs on; tier and arrival count when it comes back.
-- :name set_tier
update <job> set tier = ?, seq = ? where rid = ?

-- (rid) -> its options, in which its tags stand
-- :name options
select options from <job> where rid = ?
-- :name drop_job
delete from <job> where rid = ?
-- (tag, rid)
-- :name drop_tag
delete from <tag> where tag = ? and rid = ?
-- (rid): for a job whose options cannot be read; looks at the whole of <tag>.
-- :name drop_tags_of
delete from <tag> where rid = ?
-- (key, job id): not the key's next job, if the first one's time was over.
-- :name drop_key
delete from <idempotency> where key = ? and job_id = ?

-- :name pause
insert or ignore into <queue> (queue, paused) values (?, 1)
-- :name resume
delete from <queue> where queue = ?
-- Held jobs are few (workers x buffer), a queue's jobs may be very many: hence by place.
-- :name held_of_queue
select id from <job> indexed by <job_place> where place = 3 and queue = ?
-- (queue) -> what waiting workers may find in it: tier, jobs ready or parked
-- :name waiting_of_queue
select tier, sum(n) from <tally> where queue = ? and place in (1, 2) and n > 0 group by tier
