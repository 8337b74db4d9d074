"""`python -m services.console`"""

from services.console.main import main

main()
