"""Is a replay true to its recording? A live fleet serves traffic and is recorded; `glowplug replay` serves the same
requests again, and their latencies are set side by side.

    python bench/replay/run.py [--only SHAPE] [--port-base 9300] [--keep DIR]     (minutes)
    python bench/replay/run.py --again DIR                                        (recordings that were kept, seconds)

| shape    | fleet                                            | traffic |
|---|---|---|
| zipf     | two nodes, five emulated models that need three  | steady, models by a power law |
| burst    | the same                                         | two models, quiet; then ten seconds of all five |
| on_off   | the same                                         | every model speaks for some seconds, then rests |
| llamacpp | two nodes, four real models that need three      | steady, models by a power law |

The target: mean, p50, p90 and p99 of TTFT and of the whole answer within 20 % on emulated engines, p50 and p90 within
25 % on llama.cpp. Recorded is what the live router reported (`request.finished`), replayed what the simulator did with
the recording and nothing else. The load average of the machine stands beside each figure: live engines share two cores
with whatever else runs there, and a recording of a crowded machine is a recording of that machine.
Results: results/replay.md.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.measured.fleet import GLOWPLUG, at, fleet, recorded, rows_of
from bench.measured.load import load_now

HERE = Path(__file__).parent
BURST_S: Final = 10.0
NUM_QUIET: Final = 2  # models that are asked outside a burst
TAIL_S: Final = 25.0  # the recording goes on for so long after the last request was sent
WAIT_S: Final = 150.0  # longest wait for the last answers
FIGURES: Final = ("mean", "p50", "p90", "p99")
BYTES_PER_TOKEN: Final = 4  # of English text, for prompts of about the wanted length


@dataclass(frozen=True)
class Shape:
    """A fleet and the traffic it gets. Times are seconds, lengths tokens."""

    engine: str
    models: tuple[str, ...]
    seconds: float
    rps: float
    prompt: tuple[int, int]
    response: tuple[int, int]
    bound: float  # of the ratios that are judged
    judged: tuple[str, ...] = FIGURES
    quiet_s: float = 0.0  # of a burst, before it: three requests in four come in BURST_S after that
    on_s: float = 0.0  # of on/off traffic; each model rests twice as long
    usage: bool = True  # whether clients ask for token counts
    env: dict[str, str] = field(default_factory=dict)


EMULATED: Final = tuple(f"emulated-{name}" for name in ("chat-7b", "code-7b", "story-7b", "teacher-13b", "brief-7b"))
SMOL: Final = ("smol-chat", "smol-brief", "smol-poet", "smol-teacher")
SHAPES: Final = {
    "zipf": Shape("emulated", EMULATED, 75, 2.0, (40, 600), (20, 200), 0.20),
    "burst": Shape("emulated", EMULATED, 60, 1.5, (40, 600), (20, 200), 0.20, quiet_s=25, usage=False),
    "on_off": Shape("emulated", EMULATED, 75, 2.0, (40, 600), (20, 200), 0.20, on_s=12),
    "llamacpp": Shape("llamacpp", SMOL, 90, 0.45, (20, 80), (4, 16), 0.25, judged=("p50", "p90")),
}


@dataclass(frozen=True)
class Request:
    at_s: float
    model: str
    prompt_tokens: int
    response_tokens: int


def requests_of(shape: Shape, seed: int) -> list[Request]:
    """The requests of one run, in order of time."""
    chance = random.Random(f"{shape}/{seed}")
    weights = [1 / (number + 1) for number in range(len(shape.models))]
    num = round(shape.rps * shape.seconds)
    made = []
    for number in range(num):
        (model,) = chance.choices(shape.models, weights)
        at_s = chance.uniform(0, shape.seconds)
        if shape.quiet_s and number % 4:
            at_s = shape.quiet_s + chance.uniform(0, BURST_S)
        elif shape.quiet_s:
            (model,) = chance.choices(shape.models[:NUM_QUIET], weights[:NUM_QUIET])
        if shape.on_s:  # model i is on from i times on_s, for on_s of every three times on_s
            start_s = shape.models.index(model) * shape.on_s
            turns = max(1, int((shape.seconds - start_s) // (3 * shape.on_s)) + 1)
            at_s = min(
                start_s + chance.randrange(turns) * 3 * shape.on_s + chance.uniform(0, shape.on_s), shape.seconds
            )
        made.append(Request(at_s, model, chance.randint(*shape.prompt), chance.randint(*shape.response)))
    return sorted(made, key=lambda one: one.at_s)


async def send(request: Request, port: int, began: float, usage: bool) -> None:
    """One streamed chat, read to its end: what it took is what the router reports."""
    await asyncio.sleep(max(0.0, began + request.at_s - time.monotonic()))
    text = ("tell me " * (request.prompt_tokens * BYTES_PER_TOKEN // 8 + 1))[: request.prompt_tokens * BYTES_PER_TOKEN]
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": request.response_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    if usage:
        body["stream_options"] = {"include_usage": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-length: {len(raw)}\r\nconnection: close\r\n\r\n".encode() + raw)
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def traffic(shape: Shape, port: int, seed: int) -> None:
    began = time.monotonic()
    sending = [asyncio.create_task(send(one, port, began, shape.usage)) for one in requests_of(shape, seed)]
    _, late = await asyncio.wait(sending, timeout=shape.seconds + WAIT_S)
    for task in late:
        task.cancel()
    failed = [task for task in sending if task.done() and not task.cancelled() and task.exception()]
    if late or failed:
        print(f"{len(late)} requests did not end in time, {len(failed)} lost their connection", file=sys.stderr)


def record(shape: Shape, port_base: int, seed: int, out: Path) -> tuple[float, float]:
    """One live run, recorded to `out`; the load average over it before and after."""
    up = ("--engine", shape.engine, "--nodes", "2", "--port-base", str(port_base))
    with fleet(*up, settings=shape.env) as live:
        before = load_now()
        with recorded(live, out, shape.seconds + TAIL_S):
            asyncio.run(traffic(shape, port_base, seed))
        return before, load_now()


def answered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of ended requests, those that were answered."""
    return [row for row in rows if not row.get("error_code") and row.get("status") == 200]


def figures(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Mean and percentiles (nearest rank) of one latency, seconds."""
    values = [float(row[name]) for row in rows]
    return {"mean": fmean(values), "p50": at(values, 0.5), "p90": at(values, 0.9), "p99": at(values, 0.99)}


def compare(name: str, shape: Shape, recording: Path, load: str) -> list[str]:
    """Rows of the table for one recording, replayed now."""
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-replay-") as scratch:
        out = Path(scratch) / "replayed"
        command = [*GLOWPLUG, "replay", str(recording), "--out", str(out), "-o", "json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        ended = (out / "requests.jsonl").read_text(encoding="utf-8").splitlines()
        replayed = answered(json.loads(line) for line in ended)
    live = answered(data for kind, data in rows_of(recording) if kind == "request.finished")
    lines = []
    for latency, label in (("ttft_s", "TTFT"), ("e2e_s", "whole answer")):
        ours, theirs = figures(replayed, latency), figures(live, latency)
        ratios = {figure: ours[figure] / theirs[figure] for figure in FIGURES}
        missed = [f for f in shape.judged if abs(ratios[f] - 1) > shape.bound]
        cells = [f"{theirs[f]:.2f} / {ours[f]:.2f} = **{ratios[f]:.2f}**" for f in FIGURES]
        verdict = "yes" if not missed else f"no: {', '.join(missed)}"
        lines.append(
            f"| {name} | {label} | {len(live)} / {len(replayed)} | {' | '.join(cells)} "
            f"| {shape.bound:.0%}: {verdict} | {load} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Record each shape, replay it, and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", choices=("", *SHAPES))
    parser.add_argument("--port-base", type=int, default=9300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep the recordings in this folder")
    parser.add_argument("--again", type=Path, help="replay the recordings of this folder, without a live run")
    args = parser.parse_args()
    folder = args.again or args.keep or Path(tempfile.mkdtemp(prefix="glowplug-bench-replay-"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "| shape | latency | answered, recorded / replayed | mean | p50 | p90 | p99 | within | load average |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name, shape in SHAPES.items():
        recording, said = folder / f"{name}-{args.seed}.jsonl", folder / f"{name}-{args.seed}.load"
        if (args.only and name != args.only) or (args.again and not recording.exists()):
            continue
        if not args.again:
            before, after = record(shape, args.port_base, args.seed, recording)
            said.write_text(f"{before:.1f} to {after:.1f}", encoding="utf-8")
        lines += compare(name, shape, recording, said.read_text(encoding="utf-8"))
    if not args.only:
        (HERE / "results").mkdir(exist_ok=True)
        note = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores. Seconds: recorded / replayed = **ratio**.\n\n"
        (HERE / "results" / "replay.md").write_text(note + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
