-- uses: sound
-- A new life for ended jobs, but not for completed ones. In: ids. Out: a Done for each, in order.
-- Of several replays only the first meets an ended job. A unique key that another job holds forbids it.
local answers = {}
for i, id in ipairs(A[2]) do
  local r, sound = sound_row(id)
  if not r then
    answers[i] = sound and 'unknown' or 'conflict'
  elseif r.place < 6 or (r.unique_key and call('EXISTS', K.unique(r.queue, r.unique_key)) == 1) then
    answers[i] = 'conflict'
  else
    to_new_life(r)
    answers[i] = 'done'
  end
end
return finish(answers)
