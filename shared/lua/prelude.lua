-- Before every ledger script: the keys by name (shared/keys.py), and what several transitions do.
local LEDGER, RUNNING, OWNERS, READY, UNSAVED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local GROUPS, FINISHED, REQUEUED, CURSORS, STREAM = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local PROCESSES, ENDINGS, HOLDS, DEAD_LETTERS = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local CONSUMER_GROUP = 'trainer'

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function group_record(group_id)
  local record = redis.call('HGET', GROUPS, group_id)
  return record and cjson.decode(record) or nil
end

-- Takes a group from the running ones, and tells its owner to cancel what it still plays of it. Returns whether it ran.
-- A Redis user that may use no channels is no reason to fail: leases tell the same, later.
local function end_run(group_id, reason)
  if redis.call('ZREM', RUNNING, group_id) == 0 then
    return false
  end
  redis.call('HDEL', OWNERS, group_id)
  redis.pcall('PUBLISH', ENDINGS, reason .. ' ' .. group_id)
  return true
end

-- Sample indexes of a group that have a record in the stream.
local function finished_indexes(group_id, group_size)
  local indexes = {}
  for index = 0, group_size - 1 do
    if redis.call('HEXISTS', FINISHED, group_id .. ':' .. index) == 1 then
      indexes[#indexes + 1] = index
    end
  end
  return indexes
end

-- Removes a group's entries from the stream and everything the ledger holds under its id.
local function forget(group_id, group_size)
  for index = 0, group_size - 1 do
    local field = group_id .. ':' .. index
    local entry = redis.call('HGET', FINISHED, field)
    if entry then
      redis.call('XACK', STREAM, CONSUMER_GROUP, entry)
      redis.call('XDEL', STREAM, entry)
      redis.call('HDEL', FINISHED, field)
    end
  end
  redis.call('HDEL', FINISHED, group_id, group_id .. ':tokens')
  redis.call('HDEL', OWNERS, group_id)
  redis.call('HDEL', GROUPS, group_id)
end

-- Counts tokens that were sampled for nothing.
local function waste(reason, num_tokens)
  redis.call('HINCRBY', LEDGER, 'discarded_tokens:' .. reason, num_tokens)
end

-- Counts a group that is in no state any more as discarded, with the episodes that had finished.
local function give_up(group_id, record, reason)
  redis.call('HINCRBY', LEDGER, 'episodes_discarded', redis.call('HGET', FINISHED, group_id) or 0)
  waste(reason, redis.call('HGET', FINISHED, group_id .. ':tokens') or 0)
  forget(group_id, record.group_size)
  redis.call('HINCRBY', LEDGER, 'discarded', 1)
  redis.call('HINCRBY', LEDGER, 'discarded:' .. reason, 1)
end

-- A running group has all the episodes it needs: it is ready, or discarded if a filter's verdict names it.
local function complete(group_id, record, verdict)
  local surplus = record.group_size - tonumber(redis.call('HGET', FINISHED, group_id))
  redis.call('HINCRBY', LEDGER, 'episodes_surplus', surplus)
  end_run(group_id, 'complete')
  if verdict == '' then
    redis.call('ZADD', READY, record.start_number, group_id)
    redis.call('HSET', LEDGER, 'filtered_in_a_row', 0)
  else
    give_up(group_id, record, 'filtered:' .. verdict)
    redis.call('HINCRBY', LEDGER, 'filtered_in_a_row', 1)
  end
end
