"""The process that runs episodes: registry of environments, RolloutLoop, Environment Agents.

Reads admissions from the ledger and answers from the inference hub; writes finished episodes through the ledger into the
trajectory stream. Users write environments against `environment.py`; everything else is internal.
"""
