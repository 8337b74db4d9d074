"""Eviction: the choice of instances that leave a GPU for another."""
