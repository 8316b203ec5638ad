-- A process starts with its run file. ARGV: α of the run file, B, redundant groups. An α that was set while the run went on stays until a run
-- file says something else than the one before it.
if redis.call('HGET', LEDGER, 'ratio_of_run_file') ~= ARGV[1] then
  redis.call('HSET', LEDGER, 'ratio_of_run_file', ARGV[1], 'ratio', ARGV[1])
end
redis.call('HSET', LEDGER, 'batch_groups', ARGV[2], 'redundant_groups', ARGV[3])
