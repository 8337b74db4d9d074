"""The placer: places instances, evicts others for them, and prewarms models."""
