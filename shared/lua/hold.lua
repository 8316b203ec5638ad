-- No new group starts anywhere until this hold ends or its lease does. ARGV: hold id, lease ms; 0 ends it.
redis.call('ZADD', HOLDS, now_ms() + tonumber(ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', HOLDS, '-inf', now_ms())
