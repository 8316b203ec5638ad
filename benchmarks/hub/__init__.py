"""What the hub costs and what it saves, beside smg and sglang-router: requests per core, added latency, open calls, makespan.

`python -m benchmarks.hub --help` says what is measured. Router, engine and caller are processes of their own; each router has one
core, engine and caller have the others.
"""
