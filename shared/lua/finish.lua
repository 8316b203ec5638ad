-- One finished episode: its record into the stream and into the books, at once. ARGV: group id, sample index, record.
-- Returns 'recorded', or 'duplicate' / 'gone' with nothing written. The last episode moves its group to ready.
local group_id, field = ARGV[1], ARGV[1] .. ':' .. ARGV[2]
local record = group_record(group_id)
if not record then
  return 'gone'
end
if redis.call('HEXISTS', FINISHED, field) == 1 then
  return 'duplicate'
end
local entry = redis.call('XADD', STREAM, '*', 'group_id', group_id, 'trajectory', ARGV[3])
redis.call('HSET', FINISHED, field, entry)
redis.call('HINCRBY', LEDGER, 'episodes_finished', 1)
if redis.call('HINCRBY', FINISHED, group_id, 1) == record.group_size then
  redis.call('ZREM', RUNNING, group_id)
  redis.call('HDEL', OWNERS, group_id)
  redis.call('ZADD', READY, record.start_number, group_id)
end
return 'recorded'
