"""T14 and T15: a real vLLM through its driver: cold start, sleep and wake. T16 to T18 need a loader and a KV cache of
vLLM's in our slots (docs/gpu.md)."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.report import Place, Row, not_measured
from bench.swap import first_token
from glowplug.domain.errors import GlowplugError
from glowplug.domain.hardware import Devices
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import port, vllm_sample
from glowplug.engines.port import EngineHandle, EngineSettings
from glowplug.engines.vllm import VllmDriver
from glowplug.events.commands import StartInstance

COLD = ("T14", "cold start of vLLM to the first token", "34 to 160 s, weights apart", "recorded")
SLEEP = "sleep and wake of vLLM, {}", "0.3 to 0.6 s for 16 GB", "tokens equal"
CYCLES = 5


def run(place: Place) -> Iterator[Row]:
    """Group 4. Without `weights` it serves the sample model, which tells little about a GPU's bandwidth."""
    driver = VllmDriver(EngineSettings())
    if why := driver.unavailable():
        for row in (COLD, ("T15", SLEEP[0].format("prewarmed or swapped out"), *SLEEP[1:])):
            yield not_measured(*row, why)
    else:
        yield from asyncio.run(_measured(place, driver, place.weights or vllm_sample.prepare()))


async def _measured(place: Place, driver: VllmDriver, weights: Path) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="gp-bench-", ignore_cleanup_errors=True) as folder:
        began = time.perf_counter()
        model, devices = _model(place, weights), Devices(kind=place.kind)
        command = StartInstance(target="", instance_id="bench", model=model, workers=(), decision_id="")
        at = port.Place(run_dir=Path(folder), log_path=Path(folder) / "engine.log", devices=devices)
        handle = await driver.launch(command, at)
        try:
            report = await driver.load(handle, weights)
            handle = report.handle
            ready_s = time.perf_counter() - began
            first_s, text = await first_token(handle)
            phases = {phase.name.value: phase.ended_at - phase.started_at for phase in report.phases}
            shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
            shown = f"READY {ready_s:.2f} s ({shown}), first token {ready_s + first_s:.2f} s"
            rows.append(Row(*COLD, shown, figures={"ready": ready_s, "first_token": ready_s + first_s, **phases}))
            rows.append(await _cycles(place, driver, handle, "prewarmed", text))
            rows.append(await _cycles(place, driver, handle, "swapped_out", text))
        except GlowplugError as error:
            rows.append(Row("T15", "vLLM through its driver", "", "", f"failed: {error.message[:200]}", False))
        finally:
            await driver.stop(handle, 30.0)
            await driver.close()
    return rows


async def _cycles(place: Place, driver: VllmDriver, handle: EngineHandle, becomes: str, text: str) -> Row:
    to_sleep, to_wake, equal = [], [], True
    for _ in range(CYCLES):
        began = time.perf_counter()
        await driver.sleep(handle, becomes)
        slept = time.perf_counter()
        await driver.wake(handle)
        to_wake.append(time.perf_counter() - slept)
        to_sleep.append(slept - began)
        equal &= (await first_token(handle))[1] == text
    shown = f"sleep {statistics.median(to_sleep):.2f} s, wake {statistics.median(to_wake):.2f} s (medians of {CYCLES})"
    figures = {"sleep": statistics.median(to_sleep), "wake": statistics.median(to_wake)}
    shown += f"; tokens {'equal' if equal else 'DIFFER'}"
    return Row("T15", SLEEP[0].format(becomes), *SLEEP[1:], shown, place.met(equal), figures)


def _model(place: Place, weights: Path) -> Model:
    num_bytes = sum(file.stat().st_size for file in weights.iterdir() if file.is_file())
    return Model(
        name="Contract/Tiny",  # that bench/swap.py asks for
        key="contract-tiny",
        engine="vllm",
        weights=WeightsRef(uri=f"file:{weights}"),
        weights_bytes=num_bytes,
        kv_bytes=(8 << 30) if place.is_gpu else (256 << 20),
        context_tokens=1024,
        engine_args={"parked": False},
    )
