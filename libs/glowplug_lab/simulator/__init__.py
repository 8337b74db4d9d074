"""The simulator: the services' controllers with a virtual clock, shared links and a batching engine."""
