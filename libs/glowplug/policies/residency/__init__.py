"""Residency: who gives bytes back when somebody needs them. One file per algorithm, one signature for all."""
