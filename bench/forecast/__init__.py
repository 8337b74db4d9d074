"""Judge forecasts of requests: see __main__.py."""
