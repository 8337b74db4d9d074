"""Current state: a port, Redis (or Valkey) behind it, and a memory twin for tests."""
