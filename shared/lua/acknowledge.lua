-- A checkpoint of ARGV[1] is durable: what was trained up to it leaves the stream. Returns how many groups left.
local saved_version = tonumber(redis.call('HGET', LEDGER, 'saved_version') or 0)
if tonumber(ARGV[1]) < saved_version then
  return redis.error_reply('LEDGER the newest checkpoint is of version ' .. saved_version .. ', got ' .. ARGV[1])
end
redis.call('HSET', LEDGER, 'saved_version', ARGV[1])
local saved = redis.call('ZRANGEBYSCORE', UNSAVED, '-inf', ARGV[1])
for _, group_id in ipairs(saved) do
  local record = group_record(group_id)
  forget(group_id, record.group_size)
  redis.call('ZREM', UNSAVED, group_id)
end
return #saved
