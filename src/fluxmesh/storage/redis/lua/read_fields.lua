-- Fields of jobs. In: ids, names of fields, and a sorted set (without prefix, or nil). Out: for each id its score
-- in that set, if one was named, then its fields; an empty list for what is not a record. Changes nothing.
local ids, fields, among = A[2], A[3], A[4]
local rows = {}
for i, id in ipairs(ids) do
  local values = redis.pcall('HMGET', K.job(id), unpack(fields))
  if values.err then
    values = {}
  elseif among then
    table.insert(values, 1, call('ZSCORE', P .. among, id))
  end
  rows[i] = values
end
return rows
