"""Composition root for one machine without Docker: starts Redis, engines, hub, agents and trainer, and stops them in order."""
