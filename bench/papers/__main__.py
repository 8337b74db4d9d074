"""`python -m bench.papers`: see run.py."""

from bench.papers.run import main

if __name__ == "__main__":
    raise SystemExit(main())
