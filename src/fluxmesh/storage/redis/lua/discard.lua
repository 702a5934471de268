-- uses: sound, dropping
-- Delete ended jobs with their history, and forget their idempotency keys. In: ids. Out: a Done for each, in
-- order.
local answers = {}
for i, id in ipairs(A[2]) do
  local r, sound = sound_row(id)
  if not r then
    answers[i] = sound and 'unknown' or 'conflict'
  elseif r.place < 5 then
    answers[i] = 'conflict'
  else
    if has_key(r) then
      drop_key(r.idempotency_key)
    end
    drop_job(r)
    answers[i] = 'done'
  end
end
return finish(answers)
