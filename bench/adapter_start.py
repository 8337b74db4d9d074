"""Measure the cost of a cold LoRA adapter of about 10 MB on an engine that serves its base: seconds from `load_adapter`
to the first token of a request, beside a request to a loaded adapter.

    python -m bench.adapter_start llamacpp|vllm [--rounds 11] [--json FILE]

tests/adapters.py makes the adapter, of rank 8 over all projections of the sample model. Its bytes are in host memory
already. vLLM reads the weights in float32.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from glowplug.engines.drivers import api_of
from glowplug.engines.port import AdapterHost
from glowplug.engines.samples import prepare
from tests import adapters
from tests.contract.engine_rig import EngineCase, engine_case


async def first_token_s(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    began = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                return time.monotonic() - began
    raise RuntimeError("the engine sent no text")


async def measure(engine: str, num_rounds: int) -> dict[str, float]:
    async with engine_case(engine) as case:
        return await _measure(case, num_rounds)


async def _measure(case: EngineCase, num_rounds: int) -> dict[str, float]:
    driver = case.driver
    assert isinstance(driver, AdapterHost)
    handle = await case.launch(start={"adapter_slots": 4, "adapter_rank": 8})
    report = await driver.load(handle, prepare() if case.name == "llamacpp" else case.weights)
    case.handles.append(report.handle)
    made, model = adapters.make(1), case.model(name="Poet", key="poet", base="contract-tiny", aliases=())
    out = case.folder / "poet"
    path = adapters.write_peft(made, out) if case.name == "vllm" else adapters.write_gguf(made, out)
    warm, cold, loads = list[float](), list[float](), list[float]()
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=120) as client:
        for n in range(num_rounds + 1):
            body = {"model": "Poet", "max_tokens": 2, "temperature": 0, **api_of(model).names_adapter}
            began = time.monotonic()
            await driver.load_adapter(report.handle, model, path)
            loaded = time.monotonic() - began
            first = await first_token_s(client, body | {"prompt": f"Round {n}: the capital of France is"})
            again = await first_token_s(client, body | {"prompt": f"Again {n}: the capital of France is"})
            await driver.unload_adapter(report.handle, model)
            if n:  # the first round faults its pages in
                loads, cold, warm = [*loads, loaded], [*cold, loaded + first], [*warm, again]
    num_bytes = sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size
    p50 = {"load_s": loads, "cold_s": cold, "warm_s": warm}
    found = {f"{name}_p50": round(statistics.median(values), 4) for name, values in p50.items()}
    over = statistics.median(c - w for c, w in zip(cold, warm, strict=True))
    return {"num_bytes": num_bytes, "num_rounds": num_rounds, **found, "over_warm_s_p50": round(over, 4)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("llamacpp", "vllm"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result = asyncio.run(measure(given.engine, given.rounds))
    if given.json is not None:
        given.json.write_text(json.dumps(result))
    print(json.dumps(result, indent=2))
