"""The autoscaler: decides how many instances each model has."""
