"""Which weights leave host memory first."""
