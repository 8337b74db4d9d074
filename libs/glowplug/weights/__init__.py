"""Model weights on their way into a node's host memory: sources, links, regions."""
