"""Prediction: what demand to expect of each model in the windows to come."""
