"""The model-prefetcher of one node: brings weights into host memory and decides which stay."""
