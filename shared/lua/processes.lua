-- The agent processes that renew their leases. Returns owner, number of its episodes in flight, and so on.
local now = now_ms()
local num_episodes = {}
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', PROCESSES, '(' .. now, '+inf')) do
  num_episodes[owner] = 0
end
for _, group_id in ipairs(redis.call('ZRANGEBYSCORE', RUNNING, '(' .. now, '+inf')) do
  local owner = redis.call('HGET', OWNERS, group_id)
  local unfinished = group_record(group_id).group_size - tonumber(redis.call('HGET', FINISHED, group_id) or 0)
  num_episodes[owner] = (num_episodes[owner] or 0) + unfinished
end
local reply = {}
for owner, count in pairs(num_episodes) do
  reply[#reply + 1] = owner
  reply[#reply + 1] = count
end
return reply
