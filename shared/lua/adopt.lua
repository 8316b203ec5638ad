-- Takes over one running group whose lease has expired. ARGV: owner, lease ms.
-- Returns its record and the sample indexes already finished, or nothing. Its finished episodes stay in the stream.
local now = now_ms()
local expired = redis.call('ZRANGEBYSCORE', RUNNING, '-inf', now, 'LIMIT', 0, 1)
if #expired == 0 then
  return false
end
local group_id = expired[1]
local record = group_record(group_id)
record.attempt = record.attempt + 1
local finished = finished_indexes(group_id, record.group_size)
if #finished == 0 and redis.call('HGET', OWNERS, group_id) ~= ARGV[1] then
  record.sampling_version = nil -- Nothing that sampled is left.
end
local encoded = cjson.encode(record)
redis.call('HSET', GROUPS, group_id, encoded)
redis.call('HSET', OWNERS, group_id, ARGV[1])
redis.call('ZADD', RUNNING, now + tonumber(ARGV[2]), group_id)
return { encoded, finished }
