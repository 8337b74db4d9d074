"""Scaling: how many instances of a model should run."""
