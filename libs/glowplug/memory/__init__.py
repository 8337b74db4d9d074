"""GPU memory: `ledger` records bytes and their owners, `discovery` finds the GPUs."""
