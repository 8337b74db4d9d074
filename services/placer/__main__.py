"""`python -m services.placer`."""

from services.placer.main import main

main()
