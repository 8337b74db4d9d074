"""Scaling: the number of instances of a model that should run."""
