"""Workloads: readers of public traces, samplers of the papers, and a generator."""
