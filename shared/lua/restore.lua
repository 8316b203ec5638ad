-- The trainer resumes at version ARGV[1]: what was trained after it was lost with its weights and is ready again.
local version = tonumber(ARGV[1])
local unsaved = redis.call('ZRANGEBYSCORE', UNSAVED, '(' .. version, '+inf')
for _, group_id in ipairs(unsaved) do
  redis.call('ZREM', UNSAVED, group_id)
  redis.call('ZADD', READY, group_record(group_id).start_number, group_id)
end
redis.call('HINCRBY', LEDGER, 'trained', 0 - #unsaved)
redis.call('HSET', LEDGER, 'version', version)
return #unsaved
