"""The message bus: a port, NATS behind it, and a memory twin for tests and the simulator."""
