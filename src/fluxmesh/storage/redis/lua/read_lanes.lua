-- The parking sets that have jobs. Out: their lanes. Changes nothing.
-- Those that are shut are not in `lanes`; but then as many jobs of their key run as its limit allows.
local lanes = call('SMEMBERS', K.lanes())
local known = set_of(lanes)
for _, field in ipairs(call('HKEYS', K.running())) do
  local kind, ref = string.match(field, '^(%a):(.*)$')
  if kind == 'k' then
    for _, lane in ipairs(call('SMEMBERS', K.lanes_of('k', ref))) do
      if not known[lane] then
        known[lane] = true
        lanes[#lanes + 1] = lane
      end
    end
  end
end
return lanes
