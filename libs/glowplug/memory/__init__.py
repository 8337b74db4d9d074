"""GPU memory: the byte ledger, and what GPUs a node has (a budget of host memory, or NVIDIA hardware)."""
