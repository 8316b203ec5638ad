"""What asynchrony gains: the real scheduler, ledger and trainer's decisions under virtual time (`make bench-async`).

Real: RolloutLoop, EnvironmentAgent, the ledger's Lua in a Redis, RolloutReader with assembly, the hub's routing decision.
Modelled: engines, rewards, environments' latencies, the optimiser's step, chat rendering.
"""
