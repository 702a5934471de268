-- uses: sound
-- Move jobs that have not ended to another tier. In: ids, tier. Out: a Done for each, in order.
-- One that is there already keeps its place, so that the call may be repeated. A running job runs on: tier and
-- arrival count when it comes back.
local tier = A[3]
local answers = {}
for i, id in ipairs(A[2]) do
  local r, sound = sound_row(id)
  if not r then
    answers[i] = sound and 'unknown' or 'conflict'
  elseif r.place >= 5 then
    answers[i] = 'conflict'
  else
    if r.tier ~= tier then
      if r.place == 4 then
        call('HSET', K.job(id), 'tier', tier, 'seq', next_seq())
        count(r.queue, r.tier, 4, -1)
        count(r.queue, tier, 4, 1)
      else
        local was_held = r.place == 3
        to_new_tier(r, tier)
        if was_held and r.expires_us and r.expires_us <= now then
          -- As with every other way of giving a held job back.
          local released = row(id)
          to_end(released, 8, {token = released.token})
        end
      end
    end
    answers[i] = 'done'
  end
end
return finish(answers)
