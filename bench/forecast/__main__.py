"""Judge forecasts on days and clients that were not used to choose their constants: absolute percentage errors and
bands.

    python -m bench.forecast rows [--quick] [--part judged|tuned] [--no-mlstm]   every load, each expert alone
    python -m bench.forecast priors               prior losses of each expert, from the tuned part

`GLOWPLUG_DATA` is the folder of the traces. Split (`bench/forecast/loads.py`): constants of `combined` were chosen on
the first four days of each Azure service and one half of ServeGen's clients (an even CRC-32 of their names), busy ones
and sums of them, and on BurstGPT's first week; `rows` judges on every day after them and on the busy ones of the other
half. Windows are 600 s.
"""

import argparse

from bench.forecast import priors, rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.forecast", description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="what", required=True)
    of_rows = parts.add_parser("rows")
    of_rows.add_argument("--quick", action="store_true", help="only six clients")
    of_rows.add_argument("--part", choices=("judged", "tuned"), default="judged")
    of_rows.add_argument("--no-mlstm", action="store_true", help="leave PreServe's learned sequence out (minutes)")
    parts.add_parser("priors")
    args = parser.parse_args()
    if args.what == "rows":
        rows.run(is_quick=args.quick, part=args.part, with_mlstm=not args.no_mlstm)
    else:
        priors.run()


if __name__ == "__main__":
    main()
