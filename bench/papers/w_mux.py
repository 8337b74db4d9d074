"""MuxServe-like static sharing on WarmServe's workload: the groups of its section 7.3, with steps for their widths."""

GROUPS = {"7b-0": 8, "70b": 8, "7b-1": 4, "13b": 4}
"""GPUs of each model's only instance. Section 7.3: 7B-0 and 70B share eight, the other two share with nobody."""
OWN = {"7b-0": (1, 12.55, 6.7), "7b-1": (1, 12.55, 6.7), "13b": (2, 24.24, 13.0), "70b": (4, 128.49, 69.0)}
"""GPUs that the published step times are for, GB of weights, 1e9 weights."""
MEMORY_GB_PER_S, FLOP_PER_S = 3350.0, 0.5e15
MAX_PROMPT = 1024
PROMPT_TOKENS = 732.964  # mean of the Azure 2023 conversations, each cut at MAX_PROMPT


def widened(model: str, prefill_ms: float, decode_ms: float) -> tuple[float, float]:
    """(prefill, decode) ms on the model's group. More GPUs divide the reads of a decode step (all weights, at 3.35
    TB/s) and the arithmetic of a prefill (2 FLOP for a weight and a token, at half of the 1e15 FLOP/s of such a GPU
    without sparsity); the rest of a step keeps its length."""
    own, gigabytes, billions = OWN[model]
    saved = 1 / own - 1 / GROUPS[model]
    computes_ms = 1e3 * 2 * billions * 1e9 * PROMPT_TOKENS / FLOP_PER_S
    return prefill_ms - computes_ms * saved, decode_ms - 1e3 * gigabytes / MEMORY_GB_PER_S * saved


def settings(steps_ms: dict[str, tuple[int, int]]) -> list[str]:
    """Settings on top of scenarios/warmserve.yaml. Engines are "created in prior" (section 7.1): a launch takes
    nothing."""
    out = ["policies=muxserve_like"]
    for model, (prefill, decode) in steps_ms.items():
        wide_prefill, wide_decode = widened(model, prefill, decode)
        out.append(f"models.{model}.costs={{prefill_ms: [{wide_prefill:.2f}], decode_ms: [{wide_decode:.2f}]}}")
        out.append(f"models.{model}.num_gpus={GROUPS[model]}")
        out.append(f"models.{model}.start={{launch_s: 0}}")
    return out
