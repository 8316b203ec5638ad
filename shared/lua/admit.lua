-- A place for one group, or nothing. ARGV: group id, environment, group size, episodes needed, owner, lease ms.
-- Requeued tasks come first, whatever environment they belong to.
-- Asked again for a group that was admitted, because the reply was lost, it answers the same.
local group_id, environment, owner, lease_ms = ARGV[1], ARGV[2], ARGV[5], tonumber(ARGV[6])
local admitted = redis.call('HGET', GROUPS, group_id)
if admitted then
  return admitted
end
local fields = redis.call('HMGET', LEDGER, 'version', 'ratio', 'batch_groups', 'started', 'discarded', 'redundant_groups',
  'synchronous_until')
local version, ratio, batch_groups = tonumber(fields[1] or 0), tonumber(fields[2]), tonumber(fields[3])
local started, discarded = tonumber(fields[4] or 0), tonumber(fields[5] or 0)
-- The small term keeps a product such as 1.1 * 10 from falling below its exact value.
if redis.call('ZCOUNT', HOLDS, '(' .. now_ms(), '+inf') > 0 then
  return false
end
if version < tonumber(fields[7] or 0) then
  ratio = 0
end
local places = math.floor((version + 1 + ratio) * batch_groups + 1e-9)
-- Redundant groups shorten the wait for a batch; while a whole one is ready they would only grow old in the queue.
if redis.call('ZCARD', READY) < batch_groups then
  places = places + tonumber(fields[6] or 0)
end
if started - discarded + 1 > places then
  return false
end
local record
local requeued = redis.call('LPOP', REQUEUED)
if requeued then
  record = cjson.decode(requeued)
  record.attempt = record.attempt + 1
else
  record = { environment = environment, task_index = redis.call('HINCRBY', CURSORS, environment, 1) - 1, attempt = 0 }
  record.group_size, record.num_needed = tonumber(ARGV[3]), tonumber(ARGV[4])
end
record.group_id = group_id
record.admitted_version = version
record.start_number = redis.call('HINCRBY', LEDGER, 'started', 1)
local encoded = cjson.encode(record)
redis.call('HSET', GROUPS, group_id, encoded)
redis.call('HSET', OWNERS, group_id, owner)
redis.call('ZADD', RUNNING, now_ms() + lease_ms, group_id)
return encoded
