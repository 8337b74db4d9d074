"""`python -m services.agent`."""

from services.agent.main import main

main()
