"""`python -m services.prefetcher`."""

from services.prefetcher.main import main

main()
