"""`python -m bench.gpu`: see run.py."""

from bench.gpu.run import main

if __name__ == "__main__":
    raise SystemExit(main())
