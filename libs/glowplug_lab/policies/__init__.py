"""Policies not meant for a fleet: single papers where the union differs, and baselines of their evaluations."""
