-- What the trainer decides on, at one instant. Returns α; of each ready group, oldest start first, its record and its number of
-- episodes in the stream; and the records of running ones.
local ready, running = {}, {}
for _, group_id in ipairs(redis.call('ZRANGE', READY, 0, -1)) do
  ready[#ready + 1] = redis.call('HGET', GROUPS, group_id)
  ready[#ready + 1] = tonumber(redis.call('HGET', FINISHED, group_id))
end
for _, group_id in ipairs(redis.call('ZRANGE', RUNNING, 0, -1)) do
  running[#running + 1] = redis.call('HGET', GROUPS, group_id)
end
return { redis.call('HGET', LEDGER, 'ratio') or '0', ready, running }
