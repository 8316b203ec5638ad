-- Groups that will not be trained. ARGV: reason, '1' to run their tasks again first, '1' to spare ready groups, group ids.
-- Returns how many were given up.
local count = 0
for i = 4, #ARGV do
  local group_id = ARGV[i]
  local record = group_record(group_id)
  local is_given_up = record and end_run(group_id, ARGV[1])
  if record and not is_given_up and ARGV[3] == '0' then
    is_given_up = redis.call('ZREM', READY, group_id) > 0
  end
  if is_given_up then
    give_up(group_id, record, ARGV[1])
    if ARGV[2] == '1' then
      record.sampling_version = nil
      redis.call('RPUSH', REQUEUED, cjson.encode(record))
    end
    count = count + 1
  end
end
return count
