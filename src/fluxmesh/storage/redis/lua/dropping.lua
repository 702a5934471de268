-- Deleting an ended job with all that hangs on it: its place, its lists, its tags; not its idempotency key.

-- The tags under which a job is listed: msgpack, a list of names.
local function tags_of(id)
  local field = call('HGET', K.job(id), 'tags')
  if not field then
    return {}
  end
  local good, tags = pcall(cmsgpack.unpack, field)
  return good and type(tags) == 'table' and tags or {}
end

local function drop_job(r)
  local tags = tags_of(r.id)
  note(r, r.place, -1)
  through(function()
    call('ZREM', K.all(), r.id)
    call('ZREM', K.by_queue(r.queue), r.id)
    call('ZREM', K.by_task(r.task), r.id)
    for _, tag in ipairs(tags) do
      if type(tag) == 'string' then
        call('ZREM', K.by_tag(tag), r.id)
      end
    end
    call('DEL', K.job(r.id))
    leave(r)
  end)
end

-- The key of that job, and not of the key's next job.
local function has_key(r)
  return r.idempotency_key and call('HGET', K.idempotency(r.idempotency_key), 'job_id') == r.id
end

local function drop_key(key)
  call('DEL', K.idempotency(key))
  call('ZREM', K.forget(), key)
end
