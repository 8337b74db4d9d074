"""Engines: `port` is what an agent speaks, `drivers` finds one by name, `*_host` are the processes that some start.

This file imports nothing, because engine processes pay for it at each cold start.
"""
