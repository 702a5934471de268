-- Workers, their leases and their deaths. Inputs in the order of the ? marks.

-- :name next_epoch
update <meta> set value = value + 1 where name = 'epoch' returning value
-- :name fence
update <worker> set fenced = 1, waiting = 0 where worker_id = ? and epoch < ?
-- (epoch, worker_id, registration, lease, beat, beat_at, beat_wall, boot_id, started, status, running, fenced,
--  bell, lock)
-- :name put_worker
insert into <worker> (epoch, worker_id, registration, lease_us, beat_us, beat_at_us, beat_wall_us, boot_id,
  started_us, status, running, fenced, bell, lock) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
-- :name newer
select 1 from <worker> where worker_id = ? and epoch > ? limit 1
-- :name put_task
insert into <task> (task, spec, epoch, limited) values (?, ?, ?, ?)
  on conflict do update set spec = excluded.spec, epoch = excluded.epoch, limited = excluded.limited
-- :name put_missing_task
insert or ignore into <task> (task, spec, epoch, limited) values (?, ?, ?, ?)

-- (beat_at, beat_wall, boot_id, status, running, epoch); a supervisor's beat gives null for the last two.
-- :name renew
update <worker> set beat_at_us = ?, beat_wall_us = ?, boot_id = ?, status = coalesce(?, status),
  running = coalesce(?, running) where epoch = ?
-- :name beat_of
select beat_at_us from <worker> where epoch = ?
-- :name command_of
select command from <worker> where epoch = ?
-- :name set_command
update <worker> set command = ? where worker_id = ? and dead_how is null returning epoch

-- What a worker tells of the mesh: (epoch, now, view)
-- :name tell_mesh
insert or replace into <mesh> (epoch, told_us, view) values (?, ?, ?)
-- :name forget_mesh
delete from <mesh> where epoch = ?
-- :name forget_mesh_of_older
delete from <mesh> where epoch in (select epoch from <worker> where worker_id = ? and epoch < ?)

-- What belongs to a worker before others: (epoch, weight, parts)
-- :name tell_affinity
insert or replace into <affinity> (epoch, weight, parts) values (?, ?, ?)
-- :name forget_affinity
delete from <affinity> where epoch = ?
-- :name forget_affinity_of_older
delete from <affinity> where epoch in (select epoch from <worker> where worker_id = ? and epoch < ?)

-- What an epoch owns: (lane) -> id, token, taken (boot us), cancel flag, missed lists, rid.
-- :name owned
select id, token, pos, cancel, missed, rid from <job> where place in (3, 4) and lane = ?
-- :name missed
update <job> set missed = ? where rid = ?

-- :name meta
select value from <meta> where name = ?
-- :name set_meta
update <meta> set value = ? where name = ?
-- :name longest
select coalesce(max(lease_us), 0), coalesce(max(beat_us), 0) from <worker> where dead_how is null
-- Owner stamps of another boot, or in the future, are set to now: (now, boot_id, boot_id, now)
-- :name restamp
update <worker> set beat_at_us = ?, boot_id = ? where boot_id <> ? or beat_at_us > ?

-- (how, epoch, the words of a proof that others may better)
-- :name declare
update <worker> set dead_how = ?, waiting = 0 where epoch = ? and (dead_how is null or dead_how = ?)
-- :name is_there
select bell, lock from <worker> where epoch = ?
-- :name owns
select 1 from <job> where place in (3, 4) and lane = ? limit 1
-- :name drop_worker
delete from <worker> where epoch = ?

-- :name locks
select epoch, lock from <worker> where lock is not null and dead_how is null
-- :name owners
select distinct lane from <job> where place in (3, 4)
-- (now) -> workers dead by proof or by lapse
-- :name gone
select epoch, worker_id, dead_how, beat_at_us + lease_us < ? from <worker>
-- :name seen_missing
select seen_us, boot_id from <missing> where epoch = ?
-- :name note_missing
insert or replace into <missing> (epoch, seen_us, boot_id) values (?, ?, ?)
-- :name forget_missing
delete from <missing> where epoch = ?
-- :name orphans
select id, token, place, on_death, task, options, attempts, crashes, snoozes, interruptions, worker_id
  from <job> where place in (3, 4) and lane = ? limit ?

-- :name lead
update <meta> set value = ? where name = 'leader'
-- :name lead_until
update <meta> set value = ? where name = 'leader_until_us'
