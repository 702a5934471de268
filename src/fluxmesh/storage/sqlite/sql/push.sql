-- Who waits for what. Inputs in the order of the ? marks.

-- :name watch
insert or replace into <waiter> (job_id, bell, until_us) values (?, ?, ?)
-- :name unwatch
delete from <waiter> where job_id = ? and bell = ?
-- :name bell_of
select bell from <worker> where epoch = ? and dead_how is null
-- :name listen
insert or replace into <listener> (topic, bell, until_us) values (?, ?, ?)
-- :name unlisten
delete from <listener> where bell = ?
-- :name listeners
select bell from <listener> where topic = ? and until_us > ?
