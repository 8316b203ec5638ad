-- The first episode of a running group is about to sample: none of its tokens will be older than the version in force.
-- ARGV: group id. Of several calls the first counts.
local record = group_record(ARGV[1])
if record and not record.sampling_version then
  record.sampling_version = tonumber(redis.call('HGET', LEDGER, 'version') or 0)
  redis.call('HSET', GROUPS, ARGV[1], cjson.encode(record))
end
