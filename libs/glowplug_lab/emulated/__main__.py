"""python -m glowplug_lab.emulated RUN_DIR: pass through a cold start in modelled time, then serve."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from glowplug.engines import rendezvous
from glowplug.engines.landing import Landing
from glowplug_lab.emulated.api import Api
from glowplug_lab.emulated.engine import Engine, EngineConfig
from glowplug_lab.emulated.faults import Faults, changed
from glowplug_lab.emulated.http import Connection
from glowplug_lab.emulated.profiles import CHUNK_BYTES, DEFAULT_PROFILE, PROFILES, ColdStart
from glowplug_lab.emulated.stages import DEFAULT_STAGE_TIMEOUT_S, StageLost


def configuration(spec: dict[str, Any]) -> EngineConfig:
    args = spec["engine_args"]
    profile = PROFILES[args.get("profile", DEFAULT_PROFILE)]
    num_stages = spec.get("num_stages", 1)
    loaded_bytes = spec.get("first_bytes", 0) or -(-spec["weights_bytes"] // num_stages)
    return EngineConfig(
        profile=profile,
        context_tokens=spec["context_tokens"],
        max_running=spec["max_concurrency"],
        kv_bytes=spec["kv_bytes"],
        weights_bytes=spec["weights_bytes"],
        first_bytes=min(loaded_bytes, spec["weights_bytes"]),
        load_bytes_per_s=args.get("load_bytes_per_s", ColdStart().load_bytes_per_s),
        max_step_tokens=args.get("max_num_batched_tokens", 2048),
        long_prefill_tokens=args.get("long_prefill_token_threshold", 0),
        time_scale=spec["time_scale"],
        seed=args.get("seed", 0),
        stage=spec.get("stage", 0),
        num_stages=num_stages,
        hop_s=args.get("hop_s", 0.0),
        stage_timeout_s=args.get("stage_timeout_s", DEFAULT_STAGE_TIMEOUT_S),
    )


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def cold_start(run_dir: Path, spec: dict[str, Any], config: EngineConfig, faults: Faults) -> list[list[Any]]:
    """Return the phases of launch, load and warm-up. Raises when the weights are unavailable."""
    args, scale = spec["engine_args"], config.time_scale
    sleep_until(spec["launched_at"] + args.get("launch_s", ColdStart().launch_s) / scale)
    launched_at = time.time()
    weights = Path(rendezvous.wait(run_dir, rendezvous.GO, spec["wait_s"])["path"])
    fetched: list[list[Any]] = []
    if fetch_rate := args.get("fetch_bytes_per_s", ColdStart().fetch_bytes_per_s):
        sleep_until(spec["launched_at"] + config.part_bytes / fetch_rate / scale)
        fetched = [["fetch", spec["launched_at"], time.time()]]
    load_at = time.time()
    if not weights.exists():
        raise FileNotFoundError(f"no weights at {weights}")
    if weights.is_file() and weights.stat().st_size == 0:
        raise ValueError(f"the weights at {weights} are empty")
    if faults.startup_failure:
        raise RuntimeError(faults.startup_failure)
    moved_s = config.first_bytes / config.load_bytes_per_s / scale
    if (landing := Landing.of(weights)) is not None:  # loaded as they arrive
        landing.wait_complete(spec["wait_s"], stage=spec.get("stage", 0), num_stages=spec.get("num_stages", 1))
        last_s = min(CHUNK_BYTES, config.first_bytes) / config.load_bytes_per_s / scale
        moved_s = max(moved_s, time.time() - load_at + last_s)
    sleep_until(load_at + moved_s)
    warmup_at = time.time()
    sleep_until(warmup_at + args.get("warmup_s", ColdStart().warmup_s) / scale)
    return [
        *fetched,
        ["launch", spec["launched_at"], launched_at],
        ["load", load_at, warmup_at],
        ["warmup", warmup_at, time.time()],
    ]


async def serve(run_dir: Path, spec: dict[str, Any], engine: Engine, phases: list[list[Any]]) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    api_key = os.environ.get(rendezvous.API_KEY, "")
    api = Api(engine, spec["names"], spec["system_prompt"], api_key, spec["adapter_slots"])
    server = await loop.create_server(lambda: Connection(api), spec["host"], spec["port"], backlog=1024)
    stepping = asyncio.ensure_future(engine.run())
    stepping.add_done_callback(lambda _: stopping.set())  # an engine that cannot step must not seem alive
    port = server.sockets[0].getsockname()[1]
    config = engine.config
    step_s = config.profile.costs.decode_s(1, 0) / config.time_scale
    holds = {"num_slots": config.max_running, "kv_tokens": config.kv_tokens, "step_s": step_s}
    rendezvous.write(run_dir, rendezvous.READY, {"port": port, "phases": phases, **holds})
    print(f"emulated engine for {spec['model']} ready on port {port}", flush=True)
    await stopping.wait()
    if stepping.done():
        stepping.result()


def main() -> int:
    run_dir, spec = rendezvous.of_this_process()
    try:
        config = configuration(spec)
        faults = changed(Faults(), spec["engine_args"].get("faults", {}))
        phases = cold_start(run_dir, spec, config, faults)
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver reads the reason and the process ends
        rendezvous.write(run_dir, rendezvous.FAILED, {"message": f"{type(error).__name__}: {error}"})
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    try:
        asyncio.run(serve(run_dir, spec, Engine(config, faults), phases))
    except StageLost as error:
        print(f"a later stage of the pipeline is lost: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
