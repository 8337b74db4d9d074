"""A quick scenario for tests, and ways to write variants."""

from pathlib import Path
from typing import Any

import yaml

TINY: dict[str, Any] = {
    "title": "Two models on two GPUs",
    "seconds": 60,
    "servers": [{"name": "node", "num_servers": 1, "num_gpus": 2, "gpu_bytes": "24GB", "gpu_kind": "a10"}],
    "model_defaults": {"weights_bytes": "12.5GB", "kv_bytes": "5GB", "costs": "llama-2-7b", "max_wait_s": "1m"},
    "slo": {"ttft_s": 5},
    "models": [{"name": "chat"}, {"name": "code", "slo": {"tpot_s": 0.2}}],
    "workload": {
        "source": "gamma",
        "rps": 1.0,
        "alpha": 1,
        "lengths": {"prompt_mean": 200, "prompt_cv": 1, "response_mean": 60, "response_cv": 0.8},
    },
}


def write(folder: Path, change: dict[str, Any] | None = None, name: str = "tiny.yaml", **fields: Any) -> Path:
    """The tiny scenario with top-level fields changed, or `change` in its place."""
    path = folder / name
    path.write_text(yaml.safe_dump({**TINY, **fields} if change is None else change), encoding="utf-8")
    return path


def workload(**fields: Any) -> dict[str, Any]:
    return {**TINY["workload"], **fields}
