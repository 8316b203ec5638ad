-- Groups that will not be trained. ARGV: reason, '1' to run their tasks again first, group ids. Returns how many.
local count = 0
for i = 3, #ARGV do
  local group_id = ARGV[i]
  local record = group_record(group_id)
  if record and redis.call('ZREM', RUNNING, group_id) + redis.call('ZREM', READY, group_id) > 0 then
    forget(group_id, record.group_size)
    redis.call('HINCRBY', LEDGER, 'discarded', 1)
    redis.call('HINCRBY', LEDGER, 'discarded:' .. ARGV[1], 1)
    if ARGV[2] == '1' then
      redis.call('RPUSH', REQUEUED, cjson.encode(record))
    end
    count = count + 1
  end
end
return count
