-- A running group is complete with what it has, if that is enough. ARGV: group id, episodes needed, verdict ('' to train it).
local record = group_record(ARGV[1])
local is_running = record and redis.call('ZSCORE', RUNNING, ARGV[1])
if is_running and tonumber(redis.call('HGET', FINISHED, ARGV[1]) or 0) >= tonumber(ARGV[2]) then
  complete(ARGV[1], record, ARGV[3])
end
