"""Decides how many instances each model has."""
