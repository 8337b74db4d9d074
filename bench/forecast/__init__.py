"""How good forecasts of requests are: see __main__.py."""
