-- An agent process lives, and extends its leases. ARGV: owner, lease ms, group ids.
-- Returns the ids that are no longer this owner's to run.
local now, lease_ms = now_ms(), tonumber(ARGV[2])
redis.call('ZADD', PROCESSES, now + lease_ms, ARGV[1])
redis.call('ZREMRANGEBYSCORE', PROCESSES, '-inf', now)
local lost = {}
for i = 3, #ARGV do
  if redis.call('HGET', OWNERS, ARGV[i]) == ARGV[1] and redis.call('ZSCORE', RUNNING, ARGV[i]) then
    redis.call('ZADD', RUNNING, now + lease_ms, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
