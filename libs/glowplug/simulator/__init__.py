"""The other shell around the brains: a virtual clock, fluid links and a batching engine instead of machines."""
