"""All benchmarks whose figures a page prints: their commands, the code they measure, the pages, and the readers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.figures import readers

LIBS = "libs/glowplug"
ENGINES = (f"{LIBS}/engines", "services/agent")
START = (*ENGINES, f"{LIBS}/controllers", f"{LIBS}/weights", "services/prefetcher", "services/router")
ROUTER = ("services/router", f"{LIBS}/controllers/router")
FIGURES = ("docs/figures.md",)
BOTH = (*FIGURES, "README.md")
FIRST_USE = ("-m", "bench.first_use", "--json", "{json}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark. `sources`: the code that it measures. `read`: turns the data of `--json FILE` into the printed
    figures; None if a person measures by hand. Benchmarks with the same command share one run of it."""

    name: str
    command: tuple[str, ...]  # arguments of the interpreter; "{json}" is replaced by the file
    sources: tuple[str, ...]
    pages: tuple[str, ...] = FIGURES
    read: Callable[[Any], Mapping[str, str]] | None = None


BENCHMARKS = (
    Benchmark(name="clean-clone", command=(), sources=("deploy/local", "pyproject.toml")),
    Benchmark(
        name="installed-start",
        command=FIRST_USE,
        sources=(f"{LIBS}/runtime", f"{LIBS}/cli", "services"),
        read=readers.installed_start,
    ),
    Benchmark(name="llamacpp-cold", command=FIRST_USE, sources=START, pages=BOTH, read=readers.llamacpp_cold),
    Benchmark(
        name="llamacpp-warm", command=FIRST_USE, sources=(*ROUTER, f"{LIBS}/engines"), read=readers.llamacpp_warm
    ),
    Benchmark(
        name="fleet-memory", command=FIRST_USE, sources=(f"{LIBS}/runtime", "services"), read=readers.fleet_memory
    ),
    Benchmark(
        name="recovery",
        command=("-m", "bench.recovery", "--json", "{json}"),
        sources=(f"{LIBS}/runtime", "services"),
        pages=BOTH,
        read=readers.recovery,
    ),
    Benchmark(
        name="bus-latency",
        command=("-m", "bench.bus_latency", "--json", "{json}"),
        sources=(f"{LIBS}/bus", f"{LIBS}/events"),
        read=readers.bus_latency,
    ),
    Benchmark(
        name="router",
        command=("bench/router/run.py", "--runs", "2", "--rounds", "3", "--seconds", "4", "--json", "{json}"),
        sources=ROUTER,
        read=readers.router,
    ),
    Benchmark(
        name="routing",
        command=("bench/routing/run.py", "--json", "{json}"),
        sources=(f"{LIBS}/controllers/router", f"{LIBS}/policies/routing"),
        pages=BOTH,
        read=readers.routing,
    ),
    Benchmark(
        name="vllm-start",
        command=("-m", "bench.engine_start", "vllm", "--starts", "3", "--json", "{json}"),
        sources=ENGINES,
        pages=BOTH,
        read=readers.vllm_start,
    ),
    Benchmark(
        name="coldstart",
        command=("-m", "bench.coldstart.run", "--kinds", "streamed", "stages-2", "stages-4", "--json", "{json}"),
        sources=START,
        read=readers.coldstart,
    ),
    Benchmark(
        name="engine-start",
        command=("-m", "bench.engine_start", "llamacpp", "--json", "{json}"),
        sources=ENGINES,
        read=readers.engine_start,
    ),
    Benchmark(
        name="throughput",
        command=(
            *("-m", "bench.throughput", "--rounds", "6", "--at", "1", "4", "--kinds", "stream"),
            *("--beside", "fleet", "--json", "{json}"),
        ),
        sources=(*ROUTER, f"{LIBS}/engines"),
        read=readers.throughput,
    ),
    Benchmark(
        name="swap",
        command=("-m", "bench.swap", "llamacpp", "--json", "{json}"),
        sources=ENGINES,
        pages=BOTH,
        read=readers.swap,
    ),
    Benchmark(
        name="swap-vllm",
        command=("-m", "bench.swap", "vllm", "--json", "{json}"),
        sources=ENGINES,
        read=readers.swap,
    ),
    Benchmark(
        name="systems",
        command=(
            *("-m", "bench.systems", "--systems", "serverless_vllm", "union", "union+asleep"),
            *("--seconds", "600", "--rounds", "1", "--replay", "--json", "{json}"),
        ),
        sources=(*START, f"{LIBS}/policies"),
        read=readers.systems,
    ),
    Benchmark(
        name="adapters",
        command=("-m", "bench.adapters.run", "--json", "{json}"),
        sources=("scenarios/adapters.yaml", "libs/glowplug_lab/simulator", f"{LIBS}/controllers", f"{LIBS}/policies"),
        pages=(*FIGURES, "docs/adapters.md"),
        read=readers.adapters,
    ),
    Benchmark(
        name="console",
        command=("bench/console/run.py", "--minutes", "0", "--json", "{json}"),
        sources=("services/console",),
        read=readers.console,
    ),
    Benchmark(
        name="simulator",
        command=("bench/simulator/run.py", "--json", "{json}"),
        sources=("libs/glowplug_lab/simulator", f"{LIBS}/controllers", f"{LIBS}/policies", f"{LIBS}/fleet"),
        read=readers.simulator,
    ),
)
