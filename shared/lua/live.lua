-- What the trainer decides on, at one instant: α, the ids of ready groups, oldest start first, and of running ones.
return {
  redis.call('HGET', LEDGER, 'ratio') or '0',
  redis.call('ZRANGE', READY, 0, -1),
  redis.call('ZRANGE', RUNNING, 0, -1),
}
