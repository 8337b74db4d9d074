"""Run 200 seeds of every seeded simulation (tests/simulation) in parallel: python bench/seeds.py [--seeds 0..199]"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0..199", help="17, 3,5 or 0..199")
    parser.add_argument("--jobs", default=str(os.cpu_count() or 1), help="processes side by side")
    told, more = parser.parse_known_args()
    argv = [sys.executable, "-m", "pytest", "tests/simulation", "-n", told.jobs, *more]
    return subprocess.run(argv, cwd=ROOT, env={**os.environ, "GLOWPLUG_SIM_SEEDS": told.seeds}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
