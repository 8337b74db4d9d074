"""How good forecasts of requests are, what they cost and how soon they follow a change: see __main__.py."""
