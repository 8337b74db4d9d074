"""Prewarming: which weights are put on GPUs before any request for them, and in which free memory."""
