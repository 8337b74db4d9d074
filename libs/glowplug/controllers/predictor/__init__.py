"""The predictor: forecasts the demand of each model."""
