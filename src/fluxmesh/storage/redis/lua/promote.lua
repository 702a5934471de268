-- uses: due
-- The housekeeping verb: promotes, and expires what was not started in time. A[2] = limit. Answers the number
-- promoted, and the microseconds until the next is due.
for _, id in ipairs(call('ZRANGEBYSCORE', K.expires(), '-inf', now, 'LIMIT', 0, A[2])) do
  local r = row(id)
  if r and r.place < 4 then
    to_end(r, 8, {token = r.place == 3 and token_after(r.token) or r.token})
  else
    call('ZREM', K.expires(), id)
  end
end
local n, next_us = promote_due(A[2])
return finish({n, next_us and math.max(0, next_us - now) or false})
