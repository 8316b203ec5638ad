"""The wire contract: trajectory, stream, ledger, Redis keys, configuration and errors.

Every process imports this package and it imports none of them. It needs msgspec, redis, numpy and PyYAML only, so that a
tool which wants to read a run's trajectories installs neither torch nor a web framework.
"""
