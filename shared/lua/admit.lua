-- A place for one group, or nothing. ARGV: group id, environment, group size, owner, lease ms.
-- Requeued tasks come first, whatever environment they belong to.
-- Asked again for a group that was admitted, because the reply was lost, it answers the same.
local group_id, environment, group_size, owner, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local admitted = redis.call('HGET', GROUPS, group_id)
if admitted then
  return admitted
end
local fields = redis.call('HMGET', LEDGER, 'version', 'ratio', 'batch_groups', 'started', 'discarded')
local version, ratio, batch_groups = tonumber(fields[1] or 0), tonumber(fields[2]), tonumber(fields[3])
local started, discarded = tonumber(fields[4] or 0), tonumber(fields[5] or 0)
-- The small term keeps a product such as 1.1 * 10 from falling below its exact value.
if started - discarded + 1 > math.floor((version + 1 + ratio) * batch_groups + 1e-9) then
  return false
end
local record
local requeued = redis.call('LPOP', REQUEUED)
if requeued then
  record = cjson.decode(requeued)
  record.attempt = record.attempt + 1
else
  record = { environment = environment, task_index = redis.call('HINCRBY', CURSORS, environment, 1) - 1, attempt = 0 }
  record.group_size = group_size
end
record.group_id = group_id
record.admitted_version = version
record.start_number = redis.call('HINCRBY', LEDGER, 'started', 1)
local encoded = cjson.encode(record)
redis.call('HSET', GROUPS, group_id, encoded)
redis.call('HSET', OWNERS, group_id, owner)
redis.call('ZADD', RUNNING, now_ms() + lease_ms, group_id)
return encoded
