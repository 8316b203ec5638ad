"""The trainer's update against TRL's, and what surrounds it: `python -m benchmarks.trainer`."""
