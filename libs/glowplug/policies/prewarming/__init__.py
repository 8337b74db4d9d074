"""Prewarming: which weights go onto GPUs before anybody asks for them, and into which free memory."""
