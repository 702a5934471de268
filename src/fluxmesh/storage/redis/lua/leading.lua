-- Who keeps house.

-- True if the key is the holder's, from now on for ttl_us.
local function lead(holder, ttl_us)
  local v = call('HMGET', K.leader(), 'holder', 'until_us')
  local until_us = tonumber(v[2] or 0)
  local free = not v[1] or until_us <= now or until_us > now + 10 * ttl_us
  if not free and v[1] ~= holder then
    return false
  end
  call('HSET', K.leader(), 'holder', holder, 'until_us', now + ttl_us)
  return true
end
