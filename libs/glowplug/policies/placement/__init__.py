"""Placement: the node, GPUs and bytes of an instance."""
