-- uses: fleet, bereft, leading, due
-- One round of housekeeping. A[3] = holder, A[4] = ttl of the housekeeping key in microseconds, A[5] = how many to
-- promote, A[6] = how many orphans. Answers {leads, promoted, next due, orphans as look_for_orphans}.
-- In a large fleet only the leader looks for orphans: to look at everybody is the dearest part of a round.
local SMALL_FLEET = 16
local leads = lead(A[3], A[4])
local n, next_us = 0, false
if leads then
  n, next_us = expire_and_promote(A[5])
end
local orphans = {1, {}, false}
if leads or call('HLEN', K.workers()) <= SMALL_FLEET then
  orphans = look_for_orphans(A[6])
end
return finish({leads and 1 or 0, n, next_us, orphans})
