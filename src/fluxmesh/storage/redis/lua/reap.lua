-- uses: fleet, ends
-- Apply what was decided about orphans. A[3] = items, each {id, token, transition or nil}. Answers letters:
-- a applied, d already, s stale.
local armed = arm()
local _, dead = dead_owners(armed)
local answers = {}
for i, item in ipairs(A[3]) do
  local r = row(item[1])
  if not r or r.token ~= item[2] then
    answers[i] = r and r.token > item[2] and 'd' or 's'
  elseif (r.place ~= 3 and r.place ~= 4) or not dead[r.lane] then
    answers[i] = 's'
  else
    local token = token_after(r.token)
    if not item[3] or r.place == 3 then
      give_back(r, token)
    else
      apply(r, item[3], token)
    end
    answers[i] = 'a'
  end
end
return finish(table.concat(answers))
