"""Monitoring: metric and attribute names, metrics, traces, logs."""
