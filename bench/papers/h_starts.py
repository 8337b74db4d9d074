"""Fit the cost of a start in HydraServe's rows, per system and kind of GPU, to the cold starts the authors measured.

The paper shows these times in its Figure 7 without printing them; its artifact (github.com/gjghfd/hydraserve-artifact,
ae_scripts/figure7.py) lists them: seconds to the first token on testbed (i), 16 Gbit/s. A start is the fetch (bytes
over 2 GB/s) and PCIe at 32 GB/s, which are simulated, and a rest, which is a line over the model's size here, by least
squares per system and GPU: all 60 points are within 1.7 s of it.
"""

from collections.abc import Mapping

SIZES_GB = {
    "OPT-2.7B": 5.3,
    "OPT-6.7B": 13.3,
    "OPT-13B": 25.7,
    "Llama2-7B": 12.5,
    "Llama2-13B": 24.2,
    "Llama3-8B": 16.1,
    "Falcon-7B": 14.4,
}
SYSTEMS = ("serverless vLLM", "ServerlessLLM", "ServerlessLLM, cached", "HydraServe, one worker", "HydraServe")
MODELS = {"v100": tuple(SIZES_GB), "a10": ("OPT-2.7B", "OPT-6.7B", "Llama2-7B", "Llama3-8B", "Falcon-7B")}
_PRINTED = {
    "v100": (
        (16.8, 23.6, 40.3, 23.2, 38.6, 29.2, 25.4),
        (13.1, 17.1, 26.1, 19.1, 26.2, 21.2, 19.1),
        (11.1, 11.8, 14.8, 12.1, 15.1, 13.1, 12.1),
        (7.9, 9.7, 17.0, 9.9, 17.4, 11.7, 10.2),
        (7.9, 8.2, 8.5, 7.7, 8.7, 8.6, 8.3),
    ),
    "a10": (
        (10.1, 17.0, 16.6, 19.3, 16.2),
        (10.0, 14.1, 14.1, 17.1, 14.1),
        (7.1, 7.7, 8.1, 9.1, 8.1),
        (4.7, 8.3, 8.4, 10.3, 9.0),
        (4.7, 5.9, 5.6, 6.3, 6.2),
    ),
}
PRINTED_S: Mapping[tuple[str, str], Mapping[str, float]] = {
    (system, kind): dict(zip(MODELS[kind], row, strict=True))
    for kind, printed in _PRINTED.items()
    for system, row in zip(SYSTEMS, printed, strict=True)
}
"""(system, kind of GPU) -> model -> seconds to the first token of a cold start, as the authors measured them."""

_LEFT_S = {  # (seconds for any model, seconds per GB) beside fetch and PCIe
    ("serverless vLLM", "a10"): (5.97, 0.271),
    ("serverless vLLM", "v100"): (8.97, 0.673),
    ("ServerlessLLM", "a10"): (6.45, 0.084),
    ("ServerlessLLM", "v100"): (9.62, 0.155),
}
_AFTER_S = {"a10": (4.0, 0.0, 0.14), "v100": (4.6, 2.75, 0.06)}
"""HydraServe: (container, context and imports beside the fetch; after both; after both per GB)."""
LAUNCH_S, LIBRARY_S = 1.0, 3.0  # of a start one stage after the other; how the rest is divided changes nothing


def stages(system: str, kind: str, gigabytes: float) -> dict[str, object]:
    """The `start` of a scenario's model. `SYSTEM, ...` starts as SYSTEM does."""
    base = system.partition(",")[0]
    if base == "HydraServe":
        beside_s, after_s, per_gb = _AFTER_S[kind]
        warmup_s = after_s + per_gb * gigabytes
        return {"launch_s": LAUNCH_S, "library_s": beside_s - LAUNCH_S, "warmup_s": warmup_s, "overlap": True}
    left_s, per_gb = _LEFT_S[base, kind]
    warmup_s = left_s + per_gb * gigabytes - LAUNCH_S - LIBRARY_S
    return {"launch_s": LAUNCH_S, "library_s": LIBRARY_S, "warmup_s": warmup_s, "overlap": False}


def own(name: str, kind: str) -> dict[str, object]:
    """HydraServe's `start` through the two points of one model, with one worker and with four, without a line: the time
    after the fetch is the first point less the fetch (of four stages: a quarter of it, skewed by 0.9, hidden)."""
    after_s = PRINTED_S["HydraServe, one worker", kind][name] - SIZES_GB[name] / 2.0
    beside_s = PRINTED_S["HydraServe", kind][name] - after_s
    return {"launch_s": LAUNCH_S, "library_s": beside_s - LAUNCH_S, "warmup_s": after_s, "overlap": True}
