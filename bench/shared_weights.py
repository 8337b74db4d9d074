"""What shared weights cost and save on vLLM: `python -m bench.shared_weights [ROUNDS]`.

One engine with its weights packed for itself and one that reads those of the file answer in turn: tokens a second of
one stream, and seconds to the first token of a long prompt. Then a second engine that shares takes the place of the
packed one: private memory of each beside the pages that both read.
"""

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

import psutil

from bench.swap import MIB, private_mib, streamed
from glowplug.engines.port import EngineHandle
from tests.contract.engine_rig import EngineCase

NUM_TOKENS, LONG_WORDS = 64, 800


async def stream(handle: EngineHandle, prompt: str, num_tokens: int) -> tuple[float, float, str]:
    """(seconds to the first token, tokens a second after it, the text) of one greedy stream."""
    moments, text = await streamed(handle, prompt=prompt, max_tokens=num_tokens, ignore_eos=True)
    return moments[0], (num_tokens - 1) / max(1e-9, moments[-1] - moments[0]), text


def mapped_mib(handle: EngineHandle) -> float:
    """Pages of files in the memory of its processes, which other processes may have too."""
    leader = psutil.Process(handle.pid)
    of_each = (process.memory_info().rss for process in (leader, *leader.children(recursive=True)))
    return sum(of_each) / MIB - private_mib(handle)


async def main(num_rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        case = EngineCase("vllm", Path(folder))
        if reason := case.driver.unavailable():
            raise SystemExit(reason)
        try:
            await case.driver.warm()
            kinds = {kind: (await case.start(weights_shared=kind == "shared")).handle for kind in ("packed", "shared")}
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            prefills: dict[str, list[float]] = {kind: [] for kind in kinds}
            texts = {kind: (await stream(handle, "Once upon a time", 24))[2] for kind, handle in kinds.items()}
            for number in range(num_rounds):
                for kind, handle in kinds.items():
                    rates[kind].append((await stream(handle, "Once upon a time", NUM_TOKENS))[1])
                    prefills[kind].append((await stream(handle, f"{number} " + "word " * LONG_WORDS, 2))[0])
            memory = {"packed": (private_mib(kinds["packed"]), mapped_mib(kinds["packed"]))}
            await case.driver.stop(kinds["packed"], 5.0)
            other = (await case.start(weights_shared=True)).handle
            await stream(other, "Once upon a time", 24)
            memory |= {"shared": (private_mib(kinds["shared"]), mapped_mib(kinds["shared"]))}
            memory |= {"shared, the second": (private_mib(other), mapped_mib(other))}
        finally:
            await case.close()
    is_same, load = len(set(texts.values())) == 1, psutil.getloadavg()[0]
    print(f"{num_rounds} rounds in turn, load {load:.1f}; same greedy text: {is_same}")
    for kind in kinds:
        rate, first_s = statistics.median(rates[kind]), statistics.median(prefills[kind])
        spread = f"{min(rates[kind]):.1f} to {max(rates[kind]):.1f}"
        print(f"{kind:20} {rate:6.1f} tokens/s ({spread})   {LONG_WORDS} words: {first_s:.2f} s to the first token")
    print(f"shared decodes at {statistics.median(rates['shared']) / statistics.median(rates['packed']):.2f} of packed")
    for kind, (private, mapped) in memory.items():
        print(f"{kind:20} {private:6.0f} MiB of anonymous memory, {mapped:6.0f} MiB of files")


if __name__ == "__main__":
    asyncio.run(main(int((sys.argv[1:] or ["5"])[0])))
