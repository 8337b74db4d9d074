"""`python -m services.predictor`."""

from services.predictor.main import main

main()
