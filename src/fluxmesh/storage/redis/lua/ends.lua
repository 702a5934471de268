-- How a start ended: its entry in the history, and what becomes of the job.
local HISTORY_KEPT = 50

local packed_before = {}

-- One value as msgpack; most of them are the same for all jobs of an exchange.
local function packed(value)
  local known = packed_before[value]
  if not known then
    known = cmsgpack.pack(value)
    packed_before[value] = known
  end
  return known
end

-- rare
local function is_history(blob)
  if #blob < 3 or string.byte(blob, 1) ~= 0xdc then
    return false
  end
  local good, entries, more = pcall(cmsgpack.unpack, blob)
  return good and type(entries) == 'table' and more == nil
end

-- The stored history (an array with a 16-bit count) with one more entry, the oldest dropped past the cap. One
-- that cannot be read is begun anew.
local function append_history(r, outcome, error)
  local entry = '\151' .. packed(r.life) .. packed(r.attempts + 1) .. (r.started_us and packed(r.started_us) or '\192')
    .. packed(now) .. packed(r.worker_id or '') .. packed(outcome) .. (error or '\192')
  local blob = r.history
  if not blob or not is_history(blob) then
    return '\220\0\1' .. entry
  end
  local size = string.byte(blob, 2) * 256 + string.byte(blob, 3) + 1
  local from = 4
  while size > HISTORY_KEPT do
    local after = cmsgpack.unpack_one(blob, from - 1)
    if after < 0 then
      return '\220\0\1' .. entry
    end
    from, size = after + 1, size - 1
  end
  return '\220\0' .. string.char(size) .. string.sub(blob, from) .. entry
end

-- Carry out a transition of a running job: t = {status, outcome, charge, result, error, delay_us, reason,
-- fingerprint}, result and error as stored. While the cancel flag stands every end but COMPLETED is CANCELLED, for
-- which nothing is charged.
-- rare
local function apply(r, t, token, percent, message)
  local status, outcome, charge = t[1], t[2], t[3]
  if r.cancel and status ~= 'COMPLETED' then
    status, outcome, charge = 'CANCELLED', 'cancelled', nil
  end
  local m = {token = token, charge = charge, error = t[5], history = append_history(r, outcome, t[5])}
  m.percent = percent or r.percent
  m.message = message or r.message
  if status == 'PENDING' then
    to_ready(r, m)
  elseif status == 'SCHEDULED' then
    to_later(r, now + t[6], m)
  else
    if status == 'COMPLETED' then
      m.result = t[4]
    elseif status == 'DEAD_LETTER' then
      m.reason, m.fingerprint = t[7], t[8]
    end
    to_end(r, PLACE_OF[status], m)
  end
end
