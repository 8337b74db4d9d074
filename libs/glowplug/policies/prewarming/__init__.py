"""Prewarming: weights put on GPUs before any request for them."""
