"""Compare live fleets with the simulator's replays of their recordings: `python -m bench.fidelity --out DIR`.

The fleet of bench/systems.py (three nodes of one "GPU" each, eight models of real llama.cpp), or with `--engine vllm`
two nodes with four models of real vLLM, gets two loads that no parameter was fitted to, at rest and beside two busy
processes:

 zipf    single requests, model i in proportion to 1 / i
 bursts  a quiet model is asked some four times within seconds

(for vLLM five times as slowly).

A replay knows the recording alone. A request too many or too few before a decision changes all that follow, so each
recording is replayed several times, with the bus 0.5 to 2 times as slow as recorded, and a figure is the replays'
median; the table has the range beside it. `--again DIR` reads kept recordings.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from bench import systems
from bench.measured.data import data_option, markdown, markdown_row, write_data
from bench.measured.fleet import Ask, at, drive, fleet, recorded, rows_of
from bench.measured.load import load_now
from glowplug_lab.simulator.jobs import run_cases
from glowplug_lab.simulator.recording.read import Recording, read_recording
from glowplug_lab.simulator.recording.scenario import ARRIVALS, scenario_of, write_arrivals
from glowplug_lab.simulator.run_files import read_rows
from glowplug_lab.simulator.scenario.tree import Tree, merge
from glowplug_lab.simulator.sweep import cases, variants

LOADS: Final = ("zipf", "bursts")
RPS: Final = 1.0
BUS: Final = (0.5, 0.8, 1.0, 1.4, 2.0)  # times the recorded delay
AIM: Final = 0.2  # of a figure's distance from the recorded one
SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MEASURES: Final = {"TTFT": "ttft_s", "answer": "e2e_s"}
Figures = dict[str, dict[str, float]]  # measure -> figure -> seconds


@dataclass(frozen=True)
class Setup:
    """A fleet of one engine. `slower`: how many times as slowly it is asked."""

    engine: str
    num_models: int
    num_nodes: int
    gpu_budget: int
    host_cache: int
    slower: float
    write_models: Callable[[Path], None]

    def load_of(self, name: str, seed: int, seconds: float) -> list[Ask]:
        return [
            replace(one, at_s=one.at_s * self.slower, model=f"model-{int(one.model[-1]) % self.num_models}")
            for one in load_of(name, seed, seconds / self.slower)
        ]


VLLM_MODEL: Final = """
name: model-{number}
engine: vllm
weights: sample:smollm2-hf
kv_bytes: 128MiB
context_tokens: 1024
max_concurrency: 4
keep_alive_s: 60s
max_wait_s: 150
"""


def write_vllm_models(folder: Path) -> None:
    models = folder / "models"
    models.mkdir(parents=True)
    for number in range(SETUPS["vllm"].num_models):
        (models / f"model-{number}.yaml").write_text(VLLM_MODEL.format(number=number), encoding="utf-8")


SETUPS: Final = {
    "llamacpp": Setup(
        "llamacpp", systems.NUM_MODELS, systems.NUM_NODES, systems.GPU_BUDGET, systems.HOST_CACHE, 1.0,
        systems.write_models,
    ),
    "vllm": Setup("vllm", 4, 2, 700 << 20, 1 << 30, 5.0, write_vllm_models),  # a model takes 400 MiB
}  # fmt: skip


def load_of(name: str, seed: int, seconds: float) -> list[Ask]:
    if name == "bursts":
        return systems.load_of(seed, seconds)
    chance, words = random.Random(seed), systems.WORDS.split()
    weights = [1 / (number + 1) for number in range(systems.NUM_MODELS)]
    asks, at_s = list[Ask](), 0.0
    while (at_s := at_s + chance.expovariate(RPS)) < seconds:
        (number,) = chance.choices(range(systems.NUM_MODELS), weights)
        prompt = " ".join(chance.choices(words, k=chance.randint(4, 60)))
        asks.append(Ask(at_s, f"model-{number}", prompt, chance.randint(2, 24)))
    return asks


@contextmanager
def busy(num: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def record(setup: Setup, asks: list[Ask], num_busy: int, seconds: float, folder: Path, out: Path, port: int) -> None:
    settings = {
        "GLOWPLUG_MODELS_DIR": str(folder / "models"),
        "GLOWPLUG_GPU_BUDGETS": str(setup.gpu_budget),
        "GLOWPLUG_HOST_CACHE_BYTES": str(setup.host_cache),
    }
    up = ("--engine", setup.engine, "--nodes", str(setup.num_nodes), "--port-base", str(port))
    with fleet(*up, settings=settings) as live, busy(num_busy), recorded(live, out, seconds + systems.TAIL_S):
        ends, _ = asyncio.run(drive(asks, live))
    print(f"{out.stem}: recorded, {dict(ends)}, load {load_now():.1f}", file=sys.stderr, flush=True)


def figures(rows: Sequence[Mapping[str, Any]]) -> Figures:
    answered = [row for row in rows if "ttft_s" in row and not row["error_code"]]
    found: Figures = {}
    for measure, field in MEASURES.items():
        values = [row[field] for row in answered]
        found[measure] = {name: at(values, share) for name, share in SHARES.items()} | {"mean": fmean(values)}
    return found


def replays(recording: Recording) -> list[Figures]:
    base: Tree = scenario_of(recording)
    found = list[Figures]()
    for times in BUS:
        with tempfile.TemporaryDirectory(prefix="glowplug-bench-fidelity-") as scratch:
            folder = Path(scratch)
            write_arrivals(recording, folder / ARRIVALS)
            tree = merge(base, {"params": {"bus_s": base["params"].get("bus_s", 0.005) * times}})
            run_cases(cases(tree, folder, variants(()), (0,)), [folder / "run"], 1)
            found.append(figures(list(read_rows(folder / "run" / "requests.jsonl"))))
    return found


@dataclass(frozen=True)
class Start:
    kind: str
    model_key: str
    taken_s: float
    predicted_s: float


def starts(recording: Path) -> list[Start]:
    found = dict[str, Start]()
    for kind, data in rows_of(recording):
        if kind == "instance.ready" and (one := data["instance"])["predicted_s"]:
            taken_s = one["ready_at"] - one["created_at"]
            found[one["instance_id"]] = Start(
                one["start_kind"] or "unknown", one["model_key"], taken_s, one["predicted_s"]
            )
    return list(found.values())


def best_share(found: Sequence[Start]) -> float:
    """Return the share of starts within the aim if the best number of seconds for each model and kind were known: no
    history predicts more."""
    by_model = dict[tuple[str, str], list[float]]()
    for one in found:
        by_model.setdefault((one.kind, one.model_key), []).append(one.taken_s)
    num = sum(max(sum(abs(s / best - 1) <= AIM for s in taken) for best in taken) for taken in by_model.values())
    return num / len(found) if found else float("nan")


def share_within(ratios: Sequence[float]) -> float:
    return fmean(abs(ratio - 1) <= AIM for ratio in ratios) if ratios else float("nan")


def shown(name: str, measure: str, live: Figures, simulated: Sequence[Figures]) -> tuple[str, dict[str, Any]]:
    """Return a row of the table, and its data."""
    cells, data = list[str](), dict[str, Any]()
    for figure, recorded_s in live[measure].items():
        ratios = sorted(one[measure][figure] / recorded_s for one in simulated)
        middle = median(ratios)
        mark = "" if abs(middle - 1) <= AIM else " !"
        cells.append(f"{recorded_s:.3f}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}){mark}")
        data[figure] = {"recorded_s": recorded_s, "ratio": middle, "low": ratios[0], "high": ratios[-1]}
    return markdown_row(name, measure, *cells), data


def main() -> None:
    """Record, or read recordings, replay, and print replayed over recorded figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=SETUPS, default="llamacpp")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 2], help="busy processes beside the fleet")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load in each recording")
    parser.add_argument("--rounds", type=int, default=2, help="recordings of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port-base", type=int, default=9300)
    parser.add_argument("--out", type=Path, help="keep the recordings in this folder")
    parser.add_argument("--again", type=Path, help="read the recordings of this folder; nothing is run")
    data_option(parser)
    args = parser.parse_args()
    out = args.again or args.out or Path(tempfile.mkdtemp(prefix="glowplug-bench-fidelity-out-"))
    out.mkdir(parents=True, exist_ok=True)
    kinds = [
        (load, num_busy, seed, out / f"{load}.busy-{num_busy}.{seed}.jsonl")
        for seed in range(args.seed, args.seed + args.rounds)
        for load in args.loads
        for num_busy in args.busy
    ]
    if not args.again:
        with tempfile.TemporaryDirectory(prefix="glowplug-bench-fidelity-models-") as folder:
            setup = SETUPS[args.engine]
            setup.write_models(Path(folder))
            for load, num_busy, seed, path in kinds:
                asks = setup.load_of(load, seed, args.seconds)
                record(setup, asks, num_busy, args.seconds, Path(folder), path, args.port_base)
    print(
        markdown(["recording", "measure", *(f"{name}: seconds, replayed over recorded" for name in (*SHARES, "mean"))])
    )
    data = dict[str, Any]()
    for *_, path in kinds:
        recording = read_recording(path)
        live, simulated = figures(recording.finished), replays(recording)
        for measure in MEASURES:
            row, data[f"{path.stem}, {measure}"] = shown(path.stem, measure, live, simulated)
            print(row, flush=True)
    within = f"within {AIM:.0%} of the prediction"
    print(markdown(["recording", "starts", within, "of the best in hindsight", "taken over predicted: median"]))
    predicted = dict[str, Any]()
    for *_, path in kinds:
        found = starts(path)
        for kind in (*sorted({one.kind for one in found}), "all"):
            those = [one for one in found if kind in (one.kind, "all")]
            ratios = sorted(one.taken_s / one.predicted_s for one in those)
            share, best, middle = share_within(ratios), best_share(those), at(ratios, 0.5)
            print(markdown_row(path.stem, f"{kind}: {len(those)}", f"{share:.0%}", f"{best:.0%}", f"{middle:.2f}"))
            predicted[f"{path.stem}, {kind}"] = {"num": len(those), "within": share, "best": best, "median": middle}
    write_data(args.json, {"starts": predicted, "replayed_over_recorded": data})


if __name__ == "__main__":
    main()
