"""Runs engines on one node and reports what is there."""
