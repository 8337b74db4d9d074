"""The library's own llama.cpp server with the library's defaults, as a process that ends with its standard input.

    python -m bench.throughput.server WEIGHTS SLOTS CONTEXT_TOKENS

Prints the address once it listens.
"""

import sys

import xllamacpp


def main() -> None:
    """Serve until the standard input ends."""
    weights, slots, context_tokens = sys.argv[1:]
    wanted = xllamacpp.CommonParams()
    wanted.model.path = weights
    wanted.hostnames, wanted.port = ["127.0.0.1"], 0
    wanted.n_parallel, wanted.n_ctx = int(slots), int(slots) * int(context_tokens)
    server = xllamacpp.Server(wanted)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
