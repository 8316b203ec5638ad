"""Environments, run configurations and the tiny policy's recipe, written as a user would write them."""
