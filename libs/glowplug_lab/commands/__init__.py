"""`glowplug simulate`, `plan` and `replay`."""
