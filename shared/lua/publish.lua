-- The weights trained on these groups are in force. ARGV: new version, group ids (all ready). Opens the next places.
-- Asked again for the version in force, because the reply was lost, it changes nothing.
local version = tonumber(ARGV[1])
local function is_repeated()
  for i = 2, #ARGV do
    if tonumber(redis.call('ZSCORE', UNSAVED, ARGV[i]) or -1) ~= version then
      return false
    end
  end
  return #ARGV > 1
end
local expected = tonumber(redis.call('HGET', LEDGER, 'version') or 0) + 1
if version == expected - 1 and is_repeated() then
  return version
end
if version ~= expected then
  return redis.error_reply('LEDGER the next version to publish is ' .. expected .. ', got ' .. version)
end
for i = 2, #ARGV do
  if not redis.call('ZSCORE', READY, ARGV[i]) then
    return redis.error_reply('LEDGER group ' .. ARGV[i] .. ' is not ready, so it cannot have been trained')
  end
end
for i = 2, #ARGV do
  redis.call('ZREM', READY, ARGV[i])
  redis.call('ZADD', UNSAVED, version, ARGV[i])
end
redis.call('HINCRBY', LEDGER, 'trained', #ARGV - 1)
redis.call('HSET', LEDGER, 'version', version)
return version
