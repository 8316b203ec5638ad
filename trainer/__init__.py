"""The trainer: groups of trajectories from the stream become weight updates that the engines serve.

Reads the trajectory stream and the ledger, writes checkpoints, metrics and lineage to the run directory, pushes weights through
the inference hub. `train.py` is the entry point; `step.py` holds one update from batch to checkpoint. Rank 0 alone talks to
Redis, the hub and the agents, except that every rank fetches its own share of a batch from the stream.
"""
