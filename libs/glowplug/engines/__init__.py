"""Engines: `port` is the interface that agents use, `drivers` finds one by name, and `*_host` are the processes that
some start. This file imports nothing, because engine processes pay for it at each cold start."""
