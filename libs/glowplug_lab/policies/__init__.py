"""Policies that a fleet would not choose: each paper alone where the union goes another way, and the baselines of
their evaluations."""
