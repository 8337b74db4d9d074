"""The prefetcher: keeps weights in the host memory of one node, and on its disk."""
