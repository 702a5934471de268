-- Give owned jobs back. A[2] = epoch, A[3] = jobs, each {id, token}. Answers 1 or 0 per job.
local answers = {}
S.asking = int(A[2])
for i, item in ipairs(A[3]) do
  local r = row(item[1])
  local own = r and r.token == item[2] and r.lane == S.asking and (r.place == 3 or r.place == 4)
  if own then
    give_back(r, token_after(r.token))
  end
  answers[i] = own and 1 or 0
end
return finish(answers)
