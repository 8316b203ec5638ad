"""The whole run under load for a long time, and what grew meanwhile: memory, connections, files, threads, tasks, Redis keys.

Owns the samples and what counts as a leak; reads the process table, Redis and the services' metrics; writes samples and a plot.
"""
