"""Workloads: readers of public traces, samplers as the papers describe them, and a generator in place of traces."""
