"""Placement: which GPU of which node an instance goes to, and how many bytes it is granted."""
