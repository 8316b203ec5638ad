-- Every count of the ledger at one instant.
return {
  redis.call('HGETALL', LEDGER),
  redis.call('ZCARD', RUNNING),
  redis.call('ZCARD', READY),
  redis.call('ZCARD', UNSAVED),
  redis.call('LLEN', REQUEUED),
  redis.call('XLEN', STREAM),
  redis.call('ZCOUNT', HOLDS, '(' .. now_ms(), '+inf'),
}
