"""`python -m services.autoscaler`."""

from services.autoscaler.main import main

main()
