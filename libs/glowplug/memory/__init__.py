"""GPU memory. The ledger is the agent's record of bytes: each byte of each GPU has at most one named owner, and a start
that does not fit is refused before it begins. discovery.py finds the GPUs there are."""
