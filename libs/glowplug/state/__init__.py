"""Current state: a port, Redis (or Valkey) behind it, and an implementation in memory for tests."""
