"""Measure tokens a second through a fleet, beside the engine library's own server: `python -m bench.throughput`.

    python -m bench.throughput [--rounds 3] [--at 1 2 4 8 16] [--json FILE]
    python -m bench.throughput --engine vllm [...]

Contenders take turns, each alone while it is asked: `raw` is xllamacpp's server with the library's defaults, on the
same file with the same slots; `engine` is the engine as Glowplug's driver starts it, asked directly; `fleet` is one
instance through the router of `glowplug up`. Every answer has the same number of tokens; its prompt is new. A figure is
the median of the rounds, and a ratio compares medians with those of `raw`. Tokens per CPU second of all of a
contender's processes are printed beside them; they tell more if others load the machine.

With `--engine vllm` `raw` is vLLM's own server without our plug-in, on the same directory with as many sequences and
bytes of KV cache, and like ours without compiling, which takes minutes on a CPU.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import httpx

from bench.measured.data import data_option, markdown, write_data
from bench.measured.fleet import fleet
from bench.measured.load import load_now
from bench.throughput.processes import family, usages
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import vllm_env, vllm_sample
from glowplug.engines.drivers import driver
from glowplug.engines.port import EngineSettings, Place
from glowplug.engines.samples import sample_weights_path
from glowplug.events.commands import StartInstance

MODEL, SLOTS, CONTEXT_TOKENS, NUM_TOKENS = "smol", 6, 2048, 48
KV_BYTES: Final = 288 << 20  # six slots of SmolLM2's 22.5 KiB a token
WAIT_S: Final = 300.0
KINDS = {"whole": False, "stream": True}
WEIGHTS: Final[dict[str, Callable[[], Path]]] = {
    "llamacpp": sample_weights_path,
    "vllm": vllm_sample.prepare,
}  # by engine
STARTS_WITHIN_S: Final = 180.0
MODEL_FILE: Final = """
name: {name}
engine: {engine}
weights: {{uri: "file://{path}"}}
kv_bytes: {kv_bytes}
context_tokens: {context_tokens}
max_concurrency: {slots}
keep_alive_s: -1
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """A server at `url`, and the first of the processes whose CPU counts."""

    name: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn."""

    contender: str
    kind: str
    num_requests: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    wakeups_per_token: float
    load: float  # of the machine, before


async def answer(http: httpx.AsyncClient, number: int, *, stream: bool) -> int:
    """Request one answer. Returns its tokens."""
    content = f"Number {number}. Tell me a long story of the sea."
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    if not stream:
        whole = (await http.post("/v1/chat/completions", json=body)).raise_for_status()
        return int(whole.json()["usage"]["completion_tokens"])
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    num_tokens = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as streamed:
        streamed.raise_for_status()
        async for line in streamed.aiter_lines():
            if '"usage":{' in line:
                num_tokens = int(json.loads(line[6:])["usage"]["completion_tokens"])
    return num_tokens


async def turn(one: Contender, kind: str, num_requests: int, first: int) -> Sample:
    """Request `num_requests` answers at once; the prompts are numbered from `first`."""
    load, pids = load_now(), family(one.pid)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=one.url, timeout=WAIT_S, limits=limits) as http:
        before, began = usages(pids), time.monotonic()
        asked = (answer(http, first + number, stream=KINDS[kind]) for number in range(num_requests))
        num_tokens = sum(await asyncio.gather(*asked))
        elapsed_s, after = time.monotonic() - began, usages(pids)
    used = [after[pid] - before[pid] for pid in after if pid in before]
    cpu_s, wakeups = sum(u.cpu_s for u in used), sum(u.wakeups for u in used)
    rates = num_tokens / elapsed_s, num_tokens / cpu_s, wakeups / num_tokens
    return Sample(one.name, kind, num_requests, *rates, load)


@contextlib.contextmanager
def raw() -> Iterator[Contender]:
    """Run the library's own server."""
    argv = [sys.executable, "-m", "bench.throughput.server", str(sample_weights_path())]
    argv += [str(SLOTS), str(CONTEXT_TOKENS)]
    with tempfile.TemporaryFile() as log:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(argv, text=True, **pipes)
        try:
            assert process.stdout is not None
            yield Contender("raw", process.stdout.readline().strip(), process.pid)
        finally:
            process.communicate()


@contextlib.contextmanager
def raw_vllm() -> Iterator[Contender]:
    """Run vLLM's own server."""
    plain = {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env = os.environ | plain
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [str(vllm_env.interpreter()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(WEIGHTS["vllm"]())]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--enforce-eager"]
    argv += ["--max-num-seqs", str(SLOTS), "--max-model-len", str(CONTEXT_TOKENS)]
    argv += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            await_health(f"http://127.0.0.1:{port}", process, log)
            yield Contender("raw", f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def await_health(url: str, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    """Return once the server answers there. Raises SystemExit with its log if it ends, or takes too long."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").is_success:
                return
        time.sleep(0.1)
    log.seek(0)
    raise SystemExit(f"vLLM's own server did not start:\n{log.read()[-4000:]}")


RAW: Final = {"llamacpp": raw, "vllm": raw_vllm}


@contextlib.asynccontextmanager
async def engine(kind: str) -> AsyncIterator[Contender]:
    """Start an engine through an agent's driver."""
    weights, engines = WEIGHTS[kind](), driver(kind, EngineSettings())
    model = Model(
        name=MODEL,
        key=MODEL,
        engine=kind,
        weights=WeightsRef(uri="file:unused"),
        weights_bytes=tree_bytes(weights),
        kv_bytes=KV_BYTES,
        context_tokens=CONTEXT_TOKENS,
        max_concurrency=SLOTS,
    )
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-", ignore_cleanup_errors=True) as folder:
        command = StartInstance(target="", instance_id="bench", model=model, workers=(), decision_id="")
        place = Place(run_dir=Path(folder), log_path=Path(folder) / "engine.log")
        handle = await engines.launch(command, place)
        try:
            report = await engines.load(handle, weights)
            yield Contender("engine", report.handle.url, report.handle.pid)
        finally:
            await engines.stop(handle, 10.0)
            await engines.close()


@contextlib.contextmanager
def one_node(kind: str) -> Iterator[Contender]:
    """Run a fleet of one node and one model."""
    weights = WEIGHTS[kind]()
    budget = KV_BYTES + tree_bytes(weights) + (64 << 20)
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-models-") as folder:
        values = {"path": weights, "kv_bytes": KV_BYTES, "context_tokens": CONTEXT_TOKENS, "engine": kind}
        (Path(folder) / "smol.yaml").write_text(MODEL_FILE.format(name=MODEL, slots=SLOTS, **values), encoding="utf-8")
        settings = {"GLOWPLUG_MODELS_DIR": folder, "GLOWPLUG_GPU_BUDGETS": str(budget)}
        with fleet("--engine", kind, "--nodes", "1", "--port-base", "0", settings=settings) as live:
            pid = int(json.loads((Path(live.env["GLOWPLUG_STATE_DIR"]) / "fleet.json").read_text())["pid"])
            yield Contender("fleet", live.urls["data"], pid)


def tree_bytes(path: Path) -> int:
    """The bytes of a file, or of all files below a directory."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


async def measure(args: argparse.Namespace, contenders: Sequence[Contender]) -> list[Sample]:
    """Measure every contender in turns; each round reverses the order of the one before."""
    samples: list[Sample] = []
    for one in contenders:
        await turn(one, "whole", 1, 0)  # starts or wakes it, and warms it up
    for number in range(args.rounds):
        for kind in args.kinds:
            for num_requests in args.at:
                for one in contenders[:: 1 if number % 2 == 0 else -1]:
                    sample = await turn(one, kind, num_requests, 1 + 100 * number + 50 * len(samples))
                    samples.append(sample)
                    print(f"{one.name:10} {kind:6} {num_requests:2} at once {sample.tokens_per_s:6.1f} tokens/s "
                          f"load {sample.load:.1f}", file=sys.stderr, flush=True)  # fmt: skip
    return samples


def table(samples: Sequence[Sample]) -> str:
    """Medians; a row a contender, kind and number of requests."""
    head = ["", "at once", "tokens/s", "of raw", "tokens per CPU second", "of raw", "wake-ups a token", "load"]
    rows = []
    groups: dict[tuple[str, int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.kind, sample.num_requests, sample.contender), []).append(sample)
    for (kind, at, name), of_it in sorted(groups.items(), key=lambda item: item[0][:2]):
        base = groups[kind, at, "raw"]
        rate, base_rate = (statistics.median(s.tokens_per_s for s in some) for some in (of_it, base))
        each, base_each = (statistics.median(s.tokens_per_cpu_s for s in some) for some in (of_it, base))
        wakes = statistics.median(s.wakeups_per_token for s in of_it)
        loads = f"{min(s.load for s in of_it):.1f}-{max(s.load for s in of_it):.1f}"
        cells = [f"{rate:.1f}", f"{rate / base_rate:.2f}", f"{each:.1f}", f"{each / base_each:.2f}", f"{wakes:.0f}"]
        rows.append((f"{name}, {kind}", at, *cells, loads))
    return markdown(head, rows)


def circumstances() -> dict[str, Any]:
    """The conditions to print with a figure."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "command": " ".join(["python -m bench.throughput", *sys.argv[1:]]),
    }


async def compete(args: argparse.Namespace) -> list[Sample]:
    """Start every contender asked for, and measure."""
    async with contextlib.AsyncExitStack() as stack:
        contenders = [stack.enter_context(RAW[args.engine]())]
        if "engine" in args.beside:
            contenders.append(await stack.enter_async_context(engine(args.engine)))
        if "fleet" in args.beside:
            contenders.append(stack.enter_context(one_node(args.engine)))
        return await measure(args, contenders)


def main() -> None:
    """Measure, print the table, and write the data where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=RAW, default="llamacpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="REQUESTS")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--beside", nargs="*", choices=("engine", "fleet"), default=["engine", "fleet"])
    data_option(parser)
    args = parser.parse_args()
    result = circumstances()
    samples = asyncio.run(compete(args))
    result["samples"] = [asdict(sample) for sample in samples]
    print(table(samples))
    print(f"\n{result['command']}: {result['commit']}, {result['date']}, {result['machine']}, load {load_now():.1f}")
    write_data(args.json, result)


if __name__ == "__main__":
    main()
