-- What operators and retention meet: every record there is, also what another hand has spoilt. Such a record is
-- left as it is.

-- The record of a job; nil: there is none. Second: whether it is sound.
local function sound_row(id)
  local r = row(id)
  if not r then
    return nil, call('EXISTS', K.job(id)) == 0
  end
  if r.unsound or r.tier < 0 or r.tier > 3 or (r.place == 0 and not r.due_us) then
    return nil, false
  end
  return r, true
end
