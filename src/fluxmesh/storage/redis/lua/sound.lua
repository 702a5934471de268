-- A record that moves can be made of: an operator's verb, unlike a claim, meets every record there is, also what
-- another hand has written. What is not sound is left as it is, before anything is written.
local MUST = {'queue', 'tier', 'task', 'token', 'seq', 'life', 'attempts', 'snoozes', 'interruptions', 'crashes'}

-- The record of a job; nil: there is none. Second: whether it is sound.
local function sound_row(id)
  local good, r = pcall(row, id)
  if not good then
    return nil, false
  end
  if not r then
    return nil, true
  end
  for _, name in ipairs(MUST) do
    if r[name] == nil then
      return nil, false
    end
  end
  local at = r.place
  if not STATUS[at] or r.tier < 0 or r.tier > 3 then
    return nil, false
  end
  if (at == 0 and not r.due_us) or (at >= 2 and at <= 4 and not r.lane) or (at == 2 and not lane_parts(r.lane)) then
    return nil, false
  end
  return r, true
end
