"""Decides where instances run, who leaves for them, and what is prewarmed."""
