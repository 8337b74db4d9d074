"""Engines: `port` is the agents' interface, `drivers` finds one by name. Imports nothing, since engine processes pay
for it at each cold start."""
