"""Current state: a port, Redis (or Valkey) behind it, and an in-memory store for tests."""
