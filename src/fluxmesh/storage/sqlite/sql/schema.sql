-- The tables of one namespace. <name> stands for "namespace:name".
-- Invariants
--   * A job is one row, and (place, lane, pos) is the one place where it is:
--       0 SCHEDULED  lane = tier            pos = due instant (wall us)
--       1 READY      lane = tier:queue      pos = arrival sequence
--       2 PARKED     lane = a row of <lane> pos = arrival sequence
--       3 HELD       lane = owner's epoch   pos = when it was taken (boot us)
--       4 RUNNING    lane = owner's epoch   pos = when it was taken (boot us)
--       5 COMPLETED 6 DEAD_LETTER 7 CANCELLED 8 EXPIRED   lane = ''   pos = when it ended (wall us)
--   * rid is the arrival sequence at creation: it never repeats, and orders jobs by creation.
--   * The columns that may be large stand last: a row is judged without reading past its first page.
--   * request is the exchange by which a job was given to its present owner; null for any other way.
--   * What another hand writes past the verbs is refused (strict, check) where it would hurt more than its own
--     row: a verb adds to these numbers and sorts by these values for a whole batch.
--   * <tally> holds the number of jobs by (queue, tier, place); rows of 0 are removed by prune.
--   * <lane> holds the parking sets: kind t = of a task, k = of a concurrency key. n = its jobs.
--     A key's set is closed (open = 0) only while as many jobs of the key run as its limit allows.

-- :name tables
create table <job> (
  rid integer primary key,
  id text not null unique,
  place integer not null check (place between 0 and 8),
  lane text not null,
  pos integer not null check (abs(pos) <= 4611686018427387903),
  seq integer not null check (abs(seq) <= 4611686018427387903),
  queue text not null,
  tier integer not null check (tier between 0 and 3),
  task text not null,
  token integer not null default 0 check (abs(token) <= 4611686018427387903),
  life integer not null default 1 check (life between 0 and 2147483647),
  attempts integer not null default 0 check (attempts between 0 and 2147483647),
  crashes integer not null default 0 check (crashes between 0 and 2147483647),
  snoozes integer not null default 0 check (snoozes between 0 and 2147483647),
  interruptions integer not null default 0 check (interruptions between 0 and 2147483647),
  options blob,
  created_us integer not null,
  due_us integer,
  expires_us integer,
  started_us integer,
  ended_us integer,
  worker_id text,
  reason text,
  fingerprint text,
  percent real,
  message text,
  waiting_for text,
  cancel integer,
  on_death integer,
  hops integer,
  missed integer,
  request integer,
  unique_key text,
  idempotency_key text,
  concurrency_key text,
  concurrency_limit integer,
  slot integer,
  payload blob not null,
  result blob,
  history blob,
  error blob
) strict;
create index <job_place> on <job> (place, lane, pos);
create index <job_queue> on <job> (queue);
create index <job_task> on <job> (task);
create unique index <job_unique> on <job> (queue, unique_key) where unique_key is not null and place < 5;
create index <job_running_key> on <job> (concurrency_key) where place = 4 and concurrency_key is not null;
create index <job_expires> on <job> (expires_us) where expires_us is not null and place < 4;
create index <job_group> on <job> (fingerprint, pos) where fingerprint is not null and place = 6;
create index <job_reason> on <job> (reason) where place = 6;
create table <tag> (tag text not null, rid integer not null, primary key (tag, rid)) strict, without rowid;
create table <idempotency> (
  key text primary key,
  payload_hash blob not null,
  job_id text not null,
  status text,
  forget_us integer
) strict, without rowid;
create index <idempotency_forget> on <idempotency> (forget_us) where forget_us is not null;
create table <tally> (
  queue text not null, tier integer not null, place integer not null, n integer not null,
  primary key (queue, tier, place)
) strict, without rowid;
create table <lane> (
  lane text primary key,
  queue text not null,
  tier integer not null,
  kind text not null,
  ref text not null,
  n integer not null,
  open integer not null default 1
) strict, without rowid;
create index <lane_ref> on <lane> (kind, ref);
create table <queue> (queue text primary key, paused integer not null) strict, without rowid;
create table <task> (
  task text primary key, spec blob not null, epoch integer not null, limited integer not null,
  tat_us real not null default 0
) strict, without rowid;
create index <task_limited> on <task> (task) where limited = 1;
create table <worker> (
  epoch integer primary key,
  worker_id text not null,
  registration blob not null,
  lease_us integer not null,
  beat_us integer not null,
  beat_at_us integer not null,
  beat_wall_us integer not null,
  boot_id text not null,
  started_us integer not null,
  status text not null,
  running integer not null default 0,
  waiting integer not null default 0,
  fenced integer not null default 0,
  dead_how text,
  command text,
  bell text,
  lock text
) strict;
create table <missing> (epoch integer primary key, seen_us integer not null, boot_id text not null) strict;
create table <waiter> (
  job_id text not null, bell text not null, until_us integer not null, primary key (job_id, bell)
) strict, without rowid;
create table <listener> (
  bell text not null, topic text not null, until_us integer not null, primary key (topic, bell)
) strict, without rowid;
create table <meta> (name text primary key, value any) strict, without rowid;

-- Made beside the others since a version of this program that knows it; older ones never look at it.
-- :name later_tables
create table if not exists <mesh> (
  epoch integer primary key, told_us integer not null, view blob not null
) strict;
create table if not exists <affinity> (
  epoch integer primary key, weight real not null, parts blob not null
) strict;

-- Has the table of jobs this column? It was added since, and stands last in files of before. (table)
-- :name has_slot
select 1 from pragma_table_info(?) where name = 'slot'
-- :name add_slot
alter table <job> add column slot integer

-- :name first_values
insert into <meta> (name, value) values
  ('seq', 0), ('epoch', 0), ('stale', 0), ('fleet_beat_us', 0), ('boot_id', ''), ('reap_not_before_us', 0),
  ('leader', ''), ('leader_until_us', 0)
