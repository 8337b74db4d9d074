"""Forecasts on days and clients that their constants were not chosen by: absolute percentage errors, bands, costs.

    python -m bench.forecast rows [--quick] [--part judged|tuned] [--no-mlstm]   every load, each expert alone
    python -m bench.forecast priors               what is known of each expert before a load is, from the tuned part
    python -m bench.forecast changes              launches, outages and spikes: windows until the error is small again
    python -m bench.forecast cost [--models 500] [--window-s 300]   seconds of a core for all models, and memory

Traces lie where `GLOWPLUG_DATA` says. Split (`bench/forecast/loads.py`): constants of `combined` were chosen on the
first four days of each Azure service and one half of ServeGen's clients (an even CRC-32 of their names), busy ones and
sums of them, and on BurstGPT's first week; `rows` judges on every day after them and on the busy ones of the other
half. Windows are 600 s.
"""

import argparse

from bench.forecast import changes, cost, priors, rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.forecast", description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="what", required=True)
    of_rows = parts.add_parser("rows")
    of_rows.add_argument("--quick", action="store_true", help="six clients alone")
    of_rows.add_argument("--part", choices=("judged", "tuned"), default="judged")
    of_rows.add_argument("--no-mlstm", action="store_true", help="leave PreServe's learned sequence out (minutes)")
    parts.add_parser("priors")
    parts.add_parser("changes")
    of_cost = parts.add_parser("cost")
    of_cost.add_argument("--models", type=int, default=500)
    of_cost.add_argument("--window-s", type=float, default=300.0)
    args = parser.parse_args()
    if args.what == "rows":
        rows.run(is_quick=args.quick, part=args.part, with_mlstm=not args.no_mlstm)
    elif args.what == "priors":
        priors.run()
    elif args.what == "changes":
        changes.run()
    else:
        cost.run(args.models, args.window_s)


if __name__ == "__main__":
    main()
