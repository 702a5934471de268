-- The numbers of stored jobs. Out: the tally, dead letters that failed by themselves, stale settles. Changes nothing.
local found = call('HMGET', K.counters(), 'failed', 'stale')
return {call('HGETALL', K.tally()), found[1] or '0', found[2] or '0'}
