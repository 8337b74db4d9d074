"""Keeps weights in the host memory of one node."""
