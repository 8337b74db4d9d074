"""Forecasts the demand of each model."""
