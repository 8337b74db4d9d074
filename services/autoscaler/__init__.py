"""The autoscaler, which owns the models and decides how many instances each has."""
