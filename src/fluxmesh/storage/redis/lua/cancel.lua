-- uses: sound
-- Cancel jobs. In: ids. Out: a Cancelled for each, in order.
-- A running job gets the flag, of which its owner hears with every beat until the life ends, and now is noticed of
-- one; every other job that has not ended ends here. A held job gets a new token: its owner must not be able to begin it.
local answers, owners = {}, {}
for i, id in ipairs(A[2]) do
  local r = sound_row(id)
  if not r then
    answers[i] = 'unknown'
  elseif r.place >= 5 then
    answers[i] = 'ended'
  elseif r.place == 4 then
    call('HSET', K.job(id), 'cancel', 1)
    owners[r.lane] = true
    answers[i] = 'requested'
  else
    local token = r.place == 3 and token_after(r.token) or r.token
    to_end(r, 7, {token = token, percent = r.percent, message = r.message})
    answers[i] = 'cancelled'
  end
end
for epoch in pairs(owners) do
  notice(epoch)
end
return finish(answers)
