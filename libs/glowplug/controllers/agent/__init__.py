"""The agent: runs the engines of one node and reports their state."""
