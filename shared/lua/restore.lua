-- The trainer resumes at version ARGV[1], whose checkpoint taught the groups ARGV[4..], ARGV[2] in all over its lineage, and had
-- handed out tasks up to the cursors in ARGV[3]: what was trained after it was lost with its weights and is ready again; what it
-- taught is trained, even if Redis lost the publication. Returns how many are ready again.
local version, trained = tonumber(ARGV[1]), tonumber(ARGV[2])
for environment, cursor in pairs(cjson.decode(ARGV[3])) do
  if tonumber(redis.call('HGET', CURSORS, environment) or 0) < cursor then
    redis.call('HSET', CURSORS, environment, string.format('%d', cursor))
  end
end
if trained > 0 and redis.call('HEXISTS', LEDGER, 'started') == 0 then
  -- Redis lost the run. Without these, admission would take all groups ever trained for free places.
  redis.call('HSET', LEDGER, 'started', trained, 'trained', trained)
end
local unsaved = redis.call('ZRANGEBYSCORE', UNSAVED, '(' .. version, '+inf')
for _, group_id in ipairs(unsaved) do
  redis.call('ZREM', UNSAVED, group_id)
  redis.call('ZADD', READY, group_record(group_id).start_number, group_id)
end
local count = 0
for i = 4, #ARGV do
  local record = group_record(ARGV[i])
  if record and redis.call('ZREM', READY, ARGV[i]) > 0 then
    forget(ARGV[i], record.group_size)
    count = count + 1
  end
end
redis.call('HINCRBY', LEDGER, 'trained', count - #unsaved)
redis.call('HSET', LEDGER, 'version', version, 'filtered_in_a_row', 0)
return #unsaved
