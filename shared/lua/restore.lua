-- The trainer resumes at version ARGV[1], whose checkpoint taught the groups ARGV[2..]: what was trained after it was lost with
-- its weights and is ready again; what it taught is trained, even if Redis lost the publication. Returns how many are ready again.
local version = tonumber(ARGV[1])
local unsaved = redis.call('ZRANGEBYSCORE', UNSAVED, '(' .. version, '+inf')
for _, group_id in ipairs(unsaved) do
  redis.call('ZREM', UNSAVED, group_id)
  redis.call('ZADD', READY, group_record(group_id).start_number, group_id)
end
local count = 0
for i = 2, #ARGV do
  local record = group_record(ARGV[i])
  if record and redis.call('ZREM', READY, ARGV[i]) > 0 then
    forget(ARGV[i], record.group_size)
    count = count + 1
  end
end
redis.call('HINCRBY', LEDGER, 'trained', count - #unsaved)
redis.call('HSET', LEDGER, 'version', version, 'filtered_in_a_row', 0)
return #unsaved
