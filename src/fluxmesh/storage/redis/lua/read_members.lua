-- All members of sorted sets, if they are few. In: names of the sets (without prefix), the most. Out: the members,
-- or nil if there are more. Changes nothing.
local size = 0
for _, name in ipairs(A[2]) do
  size = size + call('ZCARD', P .. name)
end
if size > A[3] then
  return false
end
local members = {}
for _, name in ipairs(A[2]) do
  for _, id in ipairs(call('ZRANGE', P .. name, 0, -1)) do
    members[#members + 1] = id
  end
end
return members
