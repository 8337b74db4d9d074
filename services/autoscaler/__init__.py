"""The autoscaler: how many instances each model has. Owns the models."""
