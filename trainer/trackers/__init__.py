"""Where progress goes: console, metrics.jsonl, Prometheus, TensorBoard, W&B, Trackio. Each is one small class behind `Tracker`.

Reads UpdateMetrics and evaluations; writes files of the run directory, or whatever the tracker's own package writes.
"""
