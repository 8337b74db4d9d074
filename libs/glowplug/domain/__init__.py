"""Frozen, slotted value types that every package shares. Standard library only."""
