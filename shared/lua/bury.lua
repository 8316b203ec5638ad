-- An entry of the stream that nobody can read goes to the dead letters, and its group is discarded. ARGV: entry, reason, newest
-- dead letters to keep. Returns whether the entry was there.
local found = redis.call('XRANGE', STREAM, ARGV[1], ARGV[1])
if #found == 0 then
  return 0
end
local fields = found[1][2]
local letter = { 'entry_id', ARGV[1], 'reason', ARGV[2] }
for i = 1, #fields, 2 do
  letter[#letter + 1] = fields[i]
  letter[#letter + 1] = fields[i + 1]
  if fields[i] == 'group_id' then
    local record = group_record(fields[i + 1])
    if record and (end_run(fields[i + 1], 'unreadable') or redis.call('ZREM', READY, fields[i + 1]) > 0) then
      give_up(fields[i + 1], record, 'unreadable')
    end
  end
end
redis.call('XADD', DEAD_LETTERS, 'MAXLEN', ARGV[3], '*', unpack(letter))
redis.call('HINCRBY', LEDGER, 'dead_letters', 1)
redis.call('XACK', STREAM, CONSUMER_GROUP, ARGV[1])
redis.call('XDEL', STREAM, ARGV[1])
return 1
