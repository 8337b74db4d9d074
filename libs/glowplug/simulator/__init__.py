"""The other shell around the controllers: a virtual clock, fluid links and a batching engine instead of machines."""
