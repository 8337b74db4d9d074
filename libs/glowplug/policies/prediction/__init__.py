"""Prediction: the demand to expect of each model in coming windows."""
