-- uses: leading
-- The housekeeping key. A[2] = holder, A[3] = ttl in microseconds. Answers 1 if it is the holder's.
return finish(lead(A[2], A[3]) and 1 or 0)
