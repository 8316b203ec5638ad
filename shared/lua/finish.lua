-- One finished episode: its record into the stream and into the books, at once. ARGV: group id, sample index, record, episodes that
-- complete the group or '' for the number it was admitted with, verdict on the group if this one completes it ('' to train it),
-- tokens that the policy sampled in it.
-- Returns 'recorded', or 'duplicate' / 'surplus' / 'gone' with nothing written.
local group_id, field = ARGV[1], ARGV[1] .. ':' .. ARGV[2]
local record = group_record(group_id)
if not record then
  waste('gone', ARGV[6])
  return 'gone'
end
if redis.call('HEXISTS', FINISHED, field) == 1 then
  return 'duplicate'
end
if not redis.call('ZSCORE', RUNNING, group_id) then
  waste('surplus', ARGV[6])
  return 'surplus'
end
local entry = redis.call('XADD', STREAM, '*', 'group_id', group_id, 'trajectory', ARGV[3])
redis.call('HSET', FINISHED, field, entry)
redis.call('HINCRBY', LEDGER, 'episodes_finished', 1)
redis.call('HINCRBY', FINISHED, group_id .. ':tokens', ARGV[6])
if redis.call('HINCRBY', FINISHED, group_id, 1) >= (tonumber(ARGV[4]) or record.num_needed) then
  complete(group_id, record, ARGV[5])
end
return 'recorded'
