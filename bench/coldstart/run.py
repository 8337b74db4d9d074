"""Time the first token of a real vLLM whose weights are on another machine: `python -m bench.coldstart.run`.

Nodes are network namespaces of this machine; the traffic into each is limited (fleet.py). In each round every kind of
start takes its turn once, with a model that the fleet has not seen before: SmolLM2-135M-Instruct under another name,
from a hub of its own. Prints medians over the rounds, beside the floor, which is the time of the network alone: bytes /
(stages x bytes per second).

    python -m bench.coldstart.run --rounds 5                 (needs root, iproute2, nftables and `make vllm-env`)
    python -m bench.coldstart.run --kinds parked streamed    (those alone)
    python -m bench.coldstart.run --kinds streamed stages-2 --tokens 600    (stages become one engine within the answer)

Each kind has its nodes, and the others are drained: `parked` runs on a node whose engines load after the fetch,
`streamed` on one whose engines load during it, and stages on as many nodes as there are stages, with an objective for
the first token that fewer stages would miss (Algorithm 1 chooses; the placer is asked for its choice beforehand).

TTFT is the client's: from its request, beside the control plane, to the first text that comes back. The phases are read
from the row of the instance's slowest stage; they overlap if a start streams.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx

from bench.coldstart.fleet import TOKENS, Machines
from bench.measured.data import data_option, markdown, markdown_row, write_data
from bench.measured.load import Timed, compare, load_now
from bench.measured.stream import text_of
from glowplug.engines import vllm_env, vllm_sample

MIB: Final = 1 << 20
PROMPT: Final = "Why is the sky blue?"
NUM_TOKENS, WAIT_S = 24, 240.0
TIGHTER: Final = 0.97  # the next objective, if fewer stages than wanted meet one
LEAST_TTFT_S: Final = 0.1
KNOWN_S: Final = 0.2  # until the placer knows a deployed model
REST_S: Final = 3.0  # between starts: engines that end and kept tokenizers take cores
PARK_S: Final = 150.0  # every node parks vLLM at first, on the same cores
MODEL: Final = {
    "engine": "vllm",
    "kv_bytes": 128 * MIB,
    "context_tokens": 1024,
    "max_concurrency": 4,
    "keep_alive_s": 600,
    "max_wait_s": 120,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to start. `model` is added to the model file."""

    name: str
    num_stages: int = 1
    streams: bool = True
    model: Mapping[str, Any] = field(default_factory=dict)


KINDS: Final = (
    Kind("fresh", streams=False, model={"engine_args": {"parked": False}}),
    Kind("parked", streams=False),
    Kind("streamed"),
    Kind("stages-2", num_stages=2),
    Kind("stages-4", num_stages=4),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One start. Seconds."""

    ttft_s: float
    tpot_s: float
    gap_s: float  # the longest between two texts
    text: str
    phases: Mapping[str, float]  # name -> seconds of the slowest stage
    num_stages: int
    load: float  # of the machine, before


def start_once(machines: Machines, kind: Kind, name: str, num_tokens: int) -> Seen:
    """Send the first request to a model of that name, and remove the model."""
    nodes = [node for node in machines.nodes if (node in machines.plain) is not kind.streams]
    machines.open(nodes[: kind.num_stages])
    engine_args = {"num_threads": 1, **kind.model.get("engine_args", {})}
    weights = {"uri": f"hf:bench/{name}"}
    model = {**MODEL, **kind.model, "name": name, "weights": weights, "engine_args": engine_args}
    if kind.num_stages > 1:
        deploy_for(machines, kind, model)
    else:
        machines.deploy(model)
    load = load_now()
    try:
        with ThreadPoolExecutor(1) as aside:
            looks: list[Future[list[dict[str, Any]]]] = []

            def look() -> None:  # before its stages become one
                looks.append(aside.submit(machines.rows, "placer", "/v1/instances", model=name))

            seen = machines.inside(lambda: stream(machines.url("data"), name, num_tokens, look))
        rows = looks[0].result()
        phases: dict[str, float] = {}
        for phase in (phase for row in rows for phase in row["phases"]):
            seconds = phase["ended_at"] - phase["started_at"]
            phases[phase["name"]] = max(phases.get(phase["name"], 0.0), seconds)
        num_stages = max((row["num_stages"] for row in rows), default=0)
        return Seen(*seen, phases, num_stages, load)
    finally:
        machines.remove(name)


def deploy_for(machines: Machines, kind: Kind, model: Mapping[str, Any]) -> None:
    """Deploy a model with an objective for the first token that, by the placer's estimate, the kind's number of stages
    meets and fewer miss. Raises RuntimeError."""
    ttft_s, num_stages = WAIT_S, 0
    while ttft_s > LEAST_TTFT_S:
        machines.deploy({**model, "slo": {"ttft_s": ttft_s}})
        time.sleep(KNOWN_S)
        cost = machines.cost(str(model["name"]), "load")
        if (num_stages := len(cost["gpu_ids"])) == kind.num_stages:
            return
        ttft_s = TIGHTER * (cost["seconds"] if ttft_s == WAIT_S else ttft_s)
    raise RuntimeError(f"{kind.name}: the placer never chooses {kind.num_stages} stages; it ended at {num_stages}")


def stream(url: str, model: str, num_tokens: int, on_first: Callable[[], None]) -> tuple[float, float, float, str]:
    """(seconds to the first text, seconds per further token, longest gap between two texts, the text), greedily."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {TOKENS['GLOWPLUG_API_KEY']}"}
    parts, at = list[str](), [time.monotonic()]
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if text := text_of(line):
                at.append(time.monotonic())
                parts.append(text)
                if len(parts) == 1:
                    on_first()
    if not parts:
        raise RuntimeError(f"{model}: status {answer.status_code} and no text")
    gaps = [later - earlier for earlier, later in pairwise(at[1:])]
    return at[1] - at[0], statistics.mean(gaps) if gaps else 0.0, max(gaps, default=0.0), "".join(parts)


def until_parked(machines: Machines) -> None:
    """Wait until every node has parked vLLM. Raises RuntimeError."""
    deadline = time.monotonic() + PARK_S
    while not all(_is_parked(machines.log(f"agent-{node}")) for node in machines.nodes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"vLLM is not parked on every node after {PARK_S:g} s")
        time.sleep(0.5)


def _is_parked(log: str) -> bool:
    """Whether the engine that an agent is parking answers on its socket."""
    found = re.search(r"parking vLLM.* log=(\S+)", log)
    return found is not None and Path(found[1]).with_name("zygote.sock").exists()


def shown(kind: Kind, seen: Sequence[Seen], num_bytes: int, rate: float) -> str:
    floor_s = num_bytes / (kind.num_stages * rate)
    ttft = [one.ttft_s for one in seen]
    names = dict.fromkeys(name for one in seen for name in one.phases)
    phases = ", ".join(f"{n} {statistics.median(one.phases.get(n, 0.0) for one in seen):.2f}" for n in names)
    stages = "/".join(str(num) for num in sorted({one.num_stages for one in seen}))
    cells = [
        kind.name,
        stages,
        f"{statistics.median(ttft):.2f} ({min(ttft):.2f}-{max(ttft):.2f})",
        f"{floor_s:.2f}",
        f"{statistics.median(ttft) / floor_s:.2f}",
        phases,
        f"{statistics.median(one.tpot_s for one in seen) * 1000:.0f}",
        f"{max(one.gap_s for one in seen):.2f}",
        f"{min(one.load for one in seen):.1f}-{max(one.load for one in seen):.1f}",
    ]
    return markdown_row(*cells)


def as_data(seen: Mapping[str, Sequence[Seen]], num_bytes: int, rate: float) -> dict[str, object]:
    """The figures of each kind's starts, in the order of the rounds; and the ratio of `streamed`, one node that loads
    during its fetch, over each other kind."""
    times = {kind: [Timed(one.ttft_s, one.load) for one in some] for kind, some in seen.items()}
    return {
        "num_bytes": num_bytes,
        "bytes_per_s": rate,
        "kinds": {
            kind: {"ttft_s": [one.ttft_s for one in some], "num_stages": [one.num_stages for one in some]}
            for kind, some in seen.items()
        },
        "streamed_over": {
            kind: compare(times["streamed"], some).data()
            for kind, some in times.items()
            if kind != "streamed" and "streamed" in times
        },
    }


def main() -> None:
    """Run, print the table, and write the data where `--json` says."""
    by_name = {kind.name: kind for kind in KINDS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=by_name, default=list(by_name))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of each answer")
    parser.add_argument("--mbytes-per-s", type=float, default=20.0, help="into each node")
    data_option(parser)
    args = parser.parse_args()
    kinds, rate = [by_name[name] for name in args.kinds], args.mbytes_per_s * 1e6
    sample = vllm_sample.prepare()
    files = {path.name: path.read_bytes() for path in sorted(sample.iterdir()) if path.is_file()}
    num_bytes = sum(map(len, files.values()))
    names = [(number, kind, f"{kind.name}-{number}") for number in range(args.rounds) for kind in kinds]
    env = {"GLOWPLUG_POLICIES": "hydraserve"}
    node_env = {
        "GLOWPLUG_ENGINES": "vllm",
        "GLOWPLUG_LINK_BYTES_PER_S": str(rate),
        "GLOWPLUG_VLLM_PYTHON": str(vllm_env.interpreter()),
        "GLOWPLUG_GPU_BUDGETS": "1536MiB",
        "GLOWPLUG_HOST_CACHE_BYTES": str(2 * num_bytes),  # room for two: earlier models are evicted
    }
    seen: dict[str, list[Seen]] = {kind.name: [] for kind in kinds}
    repos = {f"bench/{name}": files for _, _, name in names}
    num_plain = int(any(not kind.streams for kind in kinds))
    num_nodes = num_plain + max((kind.num_stages for kind in kinds if kind.streams), default=0)
    with Machines(num_nodes, rate, repos, env, node_env, num_plain) as machines:
        until_parked(machines)
        for number, kind, name in names:
            time.sleep(REST_S)
            one = start_once(machines, kind, name, args.tokens)
            seen[kind.name].append(one)
            print(f"round {number + 1}, {kind.name}, {one.num_stages} stages: {one.ttft_s:.2f} s", flush=True)
    print(f"\n{num_bytes / 1e6:.0f} MB at {args.mbytes_per_s:g} MB/s; seconds, medians of {args.rounds}")
    head = ["start", "stages", "TTFT (range)", "floor", "TTFT / floor", "phases, which may overlap", "TPOT ms"]
    print(markdown([*head, "longest gap", "load"]))
    for kind in kinds:
        print(shown(kind, seen[kind.name], num_bytes, rate))
    texts = {one.text for some in seen.values() for one in some}
    print(f"\n{'all texts are equal' if len(texts) == 1 else f'{len(texts)} different texts: {sorted(texts)}'}")
    write_data(args.json, as_data(seen, num_bytes, rate))


if __name__ == "__main__":
    main()
