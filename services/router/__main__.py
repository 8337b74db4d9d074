"""`python -m services.router`."""

from services.router.main import main

main()
