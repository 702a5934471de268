-- uses: due
-- The housekeeping verb: promotes, and expires what was not started in time. A[2] = limit. Answers the number
-- promoted, and the microseconds until the next is due.
local n, next_us = expire_and_promote(A[2])
return finish({n, next_us})
