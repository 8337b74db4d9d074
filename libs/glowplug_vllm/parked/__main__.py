"""`python -m glowplug_vllm.parked park --socket S [--linger-s N] [--preload M ...] [--tokenizer DIR ...]`
`python -m glowplug_vllm.parked status --socket S`
`python -m glowplug_vllm.parked stop --socket S`        ends the zygote, not its servers
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from glowplug_vllm.parked import protocol, zygote

EX_ALREADY = 75  # EX_TEMPFAIL of sysexits.h: another process parks here


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glowplug_vllm.parked", description=__doc__)
    parser.add_argument("what", choices=["park", "status", "stop"])
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--linger-s", type=float, default=60.0, help="how long to stay without a lease")
    parser.add_argument("--preload", nargs="*", default=[], metavar="MODULE")
    parser.add_argument("--tokenizer", nargs="*", default=[], type=Path, metavar="DIR")
    options = parser.parse_args(argv)
    if options.what == "park":
        return _park(options)
    try:
        answer = protocol.ask(options.socket, {"op": "hello" if options.what == "status" else "stop"})
    except (OSError, ValueError) as error:
        print(f"no zygote answers at {options.socket}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


def _park(options: argparse.Namespace) -> int:
    try:
        held = zygote.lock(options.socket)
    except zygote.AlreadyParked as error:
        print(error, file=sys.stderr)
        return EX_ALREADY
    from glowplug_vllm.parked import boot, tokenizers  # imports vLLM: only the holder of the lock pays for it

    began = time.monotonic()
    ready = boot.park(options.preload, options.tokenizer)
    zygote.Zygote(
        options.socket,
        ready,
        keep=tokenizers.keep,
        linger_s=options.linger_s,
        parked_s=time.monotonic() - began,
        inherited=(held,),
    ).run()
    sys.stdout.flush()
    os._exit(0)  # tearing down imports costs seconds and prints leak reports


if __name__ == "__main__":
    sys.exit(main())
