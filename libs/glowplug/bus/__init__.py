"""The message bus: a port, NATS behind it, and an implementation in memory for tests and the simulator."""
