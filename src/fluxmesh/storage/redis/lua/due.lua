-- rare
local function make_ready(limit)
  local n = 0
  for tier = 0, 3 do
    local ids = n < limit and call('ZRANGEBYSCORE', K.delayed(tier), '-inf', now, 'LIMIT', 0, limit - n) or {}
    if #ids > 0 then
      local seq = next_seq(#ids)
      local gone = {}
      local function leave_delayed()
        if #gone > 0 then
          call('ZREM', K.delayed(tier), unpack(gone))
        end
      end
      owe(leave_delayed)
      for i, id in ipairs(ids) do
        local v = redis.pcall('HMGET', K.job(id), 'queue', 'task', 'place', 'slot')
        gone[i] = id
        if not v.err and v[1] and v[3] == '0' then
          count(v[1], tier, 0, -1)
          count(v[1], tier, 1, 1)
          ready(v[1], tier, v[2] or '', 1, v[4] and slot_in(v[4]) or false)
          through(function()
            call('ZADD', K.ready(v[1], tier), seq + i - 1, id)
            call('HSET', K.job(id), 'place', 1, 'seq', seq + i - 1)
          end)
        end
      end
      leave_delayed()
      n = n + #ids
    end
  end
  return n, first_due()
end

-- Make due jobs ready, oldest first in each tier. The number, and the first instant still to come.
local function promote_due(limit)
  local first = first_due()
  if not first or first > now then
    return 0, first
  end
  return make_ready(limit)
end

-- What was not started in time ends; then what is due is promoted. The number promoted, and microseconds until the
-- next is due.
local function expire_and_promote(limit)
  for _, id in ipairs(call('ZRANGEBYSCORE', K.expires(), '-inf', now, 'LIMIT', 0, limit)) do
    local r = row(id)
    if r and r.place < 4 then
      to_end(r, 8, {token = r.place == 3 and token_after(r.token) or r.token})
    else
      call('ZREM', K.expires(), id)
    end
  end
  local n, next_us = promote_due(limit)
  return n, next_us and math.max(0, next_us - now) or false
end
