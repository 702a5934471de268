-- Notes on owned jobs. A[2] = epoch, A[3] = notes, each {id, token, percent, message, on_death}.
local answers = {}
local epoch = int(A[2])
for i, note in ipairs(A[3]) do
  local v = redis.pcall('HMGET', K.job(note[1]), 'place', 'token', 'lane')
  local own = not v.err and (v[1] == '3' or v[1] == '4') and whole(v[2]) == note[2] and v[3] == epoch
  if own then
    for n, name in ipairs({'percent', 'message', 'on_death'}) do
      if note[n + 2] ~= nil then
        call('HSET', K.job(note[1]), name, note[n + 2], 'more', 1)
      end
    end
  end
  answers[i] = own and 1 or 0
end
return finish(answers)
