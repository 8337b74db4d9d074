"""The predictor: demand to come. Its first form keeps the past."""
