"""The agent of one node: grants GPU memory, starts engines, drains and stops them, and reports its instances."""
