"""The whole run while its processes are killed and stopped, by a seeded schedule.

Owns the schedule, what counts as recovered, and the account afterwards; reads Redis, the hub's API, the run's files and what the
processes print; writes a timeline and a report.
"""
