"""`python -m bench.throughput`: see run.py."""

from bench.throughput.run import main

main()
