"""S1, S2: a swap-in against a cold start, through the agent's and the placer's own path."""

from collections.abc import Callable

from bench.papers.cache import ROOT
from bench.papers.experiment import Experiment, Finding, Outcome, Runs, Verdict, prose
from bench.papers.plots import Bars
from bench.papers.simulated import SIMULATOR, figures
from glowplug.simulator.scenario import load_tree
from glowplug.simulator.workload.arrival import Arrival
from glowplug.simulator.world import World

GB = 1e9
VLLM = {  # weights, resident, cold start as printed, of which compiling and graphs (Table 1)
    "LLaMA-3.2 1B": (2.5, 72.5, 101.0, 30.85),
    "DeepSeek-R1 14B": (29.5, 72.5, 173.0, 64.18),
}
OLLAMA = {"LLaMA-3.2 1B": (2.5, 3.6, 1.96, 0.0), "DeepSeek-R1 14B": (29.5, 30.5, 5.93, 0.0)}
PAPER = {"vLLM": (18.4, 23.1), "Ollama": (2.6, 1.29)}


def tree(engine: str, name: str) -> dict[str, object]:
    """One 80 GB GPU, two models of this size; engines that leave it sleep in host memory."""
    weights, resident, cold_s, warm_s = (VLLM if engine == "vLLM" else OLLAMA)[name]
    base, rate, whole = {"vLLM": (5.3, 13.5e9, False), "Ollama": (0.23, 7.0e9, True)}[engine]
    start = {
        "launch_s": cold_s - warm_s - weights * GB / 32e9,
        "warmup_s": warm_s,
        "overlap": False,
        "swap_base_s": base,
        "swap_bytes_per_s": rate,
        "swap_resident": whole,
    }
    model = {
        "copies": 2,
        "name": "model",
        "weights_bytes": round(weights * GB),
        "kv_bytes": round((resident - weights) * GB),
        "kv_bytes_per_token": 100_000,
        "costs": "qwen2.5-7b/h100",
        "keep_alive_s": -1,
        "max_wait_s": 600,
        "start": start,
    }
    size = 80 if engine == "vLLM" else 4 if name.endswith("1B") else 34  # the next one does not fit beside it
    server = {
        "num_gpus": 1,
        "gpu_bytes": size * 10**9,
        "gpu_kind": "h100",
        "weights_in_host": True,
        "host_cache_bytes": "221GB",
        "abilities": ["swap"],
    }
    return {
        "seconds": 1000,
        "servers": [server],
        "models": [model],
        "policies": {"residency": "swapserve"},
        "params": {"placer": {"evict_becomes": "swapped_out"}, "autoscaler": {"stop_becomes": "swapped_out"}},
        "workload": {"source": "gamma", "rps": 0.1, "lengths": {"prompt_mean": 20}},
    }


def run(case: str, seed: int, quick: bool) -> Outcome:
    """A cold start and, once the engine has gone to sleep by itself, a second request; then the same with a victim: a
    request of another model in between, whose engine has to leave first."""
    engine, _, name = case.partition(" ")
    alone = tree(engine, name)
    alone["models"][0]["keep_alive_s"] = 30  # type: ignore[index]
    cold, woken = (_mean(alone, (1,) * num) for num in (1, 2))
    victim = _mean(tree(engine, name), (1, 2, 1))
    return {
        "cold": cold["ttft_mean"],
        "swap": 2 * woken["ttft_mean"] - cold["ttft_mean"],
        "swaps": woken.get("starts swapped", 0),
        "with victim": 3 * victim["ttft_mean"] - 2 * _mean(tree(engine, name), (1, 2))["ttft_mean"],
    }


def _mean(given: dict[str, object], asked: tuple[int, ...]) -> Outcome:
    """The figures of requests for these models, 300 s apart."""
    scenario = load_tree(given, ROOT / "scenarios")
    arrivals = [Arrival(1.0 + 300.0 * n, f"model-{model}", 20, 4) for n, model in enumerate(asked)]
    return figures(World(scenario.setup, iter(arrivals)).run(1000.0))


def judge(engine: str, low: float, high: float, low_14: float, high_14: float) -> Callable[[Runs], Verdict]:
    def of(runs: Runs) -> Verdict:
        small, large = (f"{engine} {name}" for name in VLLM)
        ratios = [runs.of(case, "cold").mean / runs.of(case, "swap").mean for case in (small, large)]
        formula = []
        for name in VLLM:
            weights, resident, cold_s, _ = (VLLM if engine == "vLLM" else OLLAMA)[name]
            formula.append(cold_s / (5.3 + weights / 13.5 if engine == "vLLM" else 0.23 + resident / 7.0))
        findings = [
            Finding(f"{name}: cold / swap-in", f"{ratio:.2f}x", f"{printed}x")
            for name, ratio, printed in zip(VLLM, ratios, PAPER[engine], strict=True)
        ]
        for case, by_hand in zip((small, large), formula, strict=True):
            taken = f"cold {runs.of(case, 'cold').mean:.2f} s, swap-in {runs.of(case, 'swap').mean:.2f} s"
            taken += f", with a victim to swap out first {runs.of(case, 'with victim').mean:.2f} s"
            findings.append(Finding(f"{case}: first token", f"{taken}; by the formula alone {by_hand:.2f}x"))
        bars = Bars(
            title=f"First token, {engine}",
            x_label="model",
            y_label="seconds",
            groups=list(VLLM),
            series={
                what: [runs.of(case, what).mean for case in (small, large)] for what in ("cold", "swap", "with victim")
            },
            log_y=engine == "vLLM",
        )
        passed = low <= ratios[0] <= high and low_14 <= ratios[1] <= high_14
        swaps = all(runs.of(case, "swaps").mean == 1 for case in (small, large))
        shown = f"{ratios[0]:.1f}x (1B), {ratios[1]:.2f}x (14B)"
        return Verdict(ours=shown, passed=passed and swaps, findings=findings, plots={"swap": bars})

    return of


SETUP = prose(
    """SwapServeLLM section 5.3 on one 80 GB H100: a request starts a model cold, the engine goes to sleep by itself, a
    second request wakes it; and again with a victim, an engine of another model that has to leave first. Cold starts
    are calibrated to the printed ones (101 and 173 s for vLLM, 1.96 and 5.93 s for Ollama), swap-ins to a fit of the
    printed ones (vLLM 5.3 s + weights at 13.5 GB/s, Ollama 0.23 s + resident bytes at 7 GB/s), so the row shows what
    the path through router, autoscaler, placer and agent adds. No seed matters."""
)
READS = (*SIMULATOR, "bench/papers/s_wake.py")
S1 = Experiment(
    id="S1",
    title="vLLM, cold start / swap-in, 1B and 14B",
    paper="18.4x, 23.1x (the text's 31x pairs 173 s with 5.5 s, E28)",
    band="15x to 27x",
    setup=SETUP,
    cases=lambda quick: tuple(f"vLLM {name}" for name in VLLM),
    run=run,
    judge=judge("vLLM", 15, 27, 15, 27),
    reads=READS,
    max_seeds=1,
)
S2 = Experiment(
    id="S2",
    title="Ollama, cold start / swap-in, 1B and 14B",
    paper="2.6x, 1.29x",
    band="2x to 3x, 1.15x to 1.45x",
    setup="As S1, on GPUs that hold one of the models.",
    cases=lambda quick: tuple(f"Ollama {name}" for name in OLLAMA),
    run=run,
    judge=judge("Ollama", 2, 3, 1.15, 1.45),
    reads=READS,
    max_seeds=1,
)
