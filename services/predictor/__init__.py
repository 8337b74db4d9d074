"""The predictor, which records the demand of each model and forecasts it."""
