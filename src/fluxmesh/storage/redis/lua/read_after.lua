-- A stretch of sorted sets, read from high to low. In: names of the sets (without prefix), how many of each, and
-- the score and member after which to begin (or nil). Out: for each set a list of member, score, member, score ...
-- Entries of one score go by their member, so that a stretch begins where the one before ended, also if the
-- entry there is gone. Changes nothing.
local function rank_after(name, score, member)
  local text = int(score)
  local low = call('ZCOUNT', name, '(' .. text, '+inf')
  local high = low + call('ZCOUNT', name, text, text)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = call('ZREVRANGE', name, middle, middle)[1]
    if found and found >= member then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local stretches = {}
for i, name in ipairs(A[2]) do
  local from = A[4] and rank_after(P .. name, A[4], A[5]) or 0
  stretches[i] = call('ZREVRANGE', P .. name, from, from + A[3] - 1, 'WITHSCORES')
end
return stretches
