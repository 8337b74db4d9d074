"""What the generator was fitted to. Written by bench/fit/generator.py: change that script, not this file.

Sources: Azure LLM inference trace 2024 (10 s counts of five days; CC-BY 4.0, DynamoLLM, HPCA 2025) for the cycles; its
2023 trace (40 minutes of requests; CC-BY 4.0, Splitwise, ISCA 2024) for lengths and gaps; ServeGen (320 clients, 10
days; Apache-2.0) for fleets. Rates are shares of a mean, lengths natural logarithms of tokens.
"""

from typing import Final

from glowplug.simulator.workload.generator_shapes import Cycle, TenantLengths, Tenants

CONVERSATION: Final = Cycle(
    weekday=(
        0.863, 0.941, 0.947, 0.778, 0.785, 0.843, 0.991, 1.057, 1.101, 1.062, 0.972, 1.03,
        1.144, 1.278, 1.358, 1.261, 1.142, 1.078, 1.11, 1.049, 0.948, 0.788, 0.72, 0.754,
    ),
    weekend=(
        0.479, 0.507, 0.485, 0.431, 0.398, 0.408, 0.426, 0.484, 0.486, 0.461, 0.476, 0.535,
        0.56, 0.698, 0.646, 0.663, 0.631, 0.652, 0.656, 0.605, 0.596, 0.58, 0.539, 0.651,
    ),
    stray_sigma=0.062,
    stray_keep=0.689,
    jitter_sigma=0.028,
    gap_cv=1.021,
    parts=(
        (0.2646, 5.9851, 0.0388, 4.5226, 0.2418),
        (0.2565, 6.9744, 0.0668, 6.0014, 0.046),
        (0.254, 6.6707, 1.0441, 4.6677, 0.4976),
        (0.1004, 8.3159, 0.02, 3.9966, 0.4373),
        (0.0705, 5.3405, 1.4356, 4.214, 1.0781),
        (0.054, 6.9849, 0.0662, 6.2426, 0.1728),
    ),
    max_prompt=14050,
    max_response=1000,
    min_response=7,
)  # fmt: skip

CODE: Final = Cycle(
    weekday=(
        0.678, 0.692, 0.628, 0.499, 0.413, 0.337, 0.281, 0.245, 0.224, 0.242, 0.254, 0.361,
        0.658, 1.197, 1.714, 1.872, 1.711, 1.976, 2.179, 2.227, 2.091, 1.531, 1.163, 0.828,
    ),
    weekend=(
        0.45, 0.437, 0.389, 0.376, 0.324, 0.258, 0.206, 0.14, 0.108, 0.096, 0.091, 0.121,
        0.193, 0.262, 0.325, 0.374, 0.403, 0.438, 0.483, 0.498, 0.495, 0.501, 0.49, 0.458,
    ),
    stray_sigma=0.121,
    stray_keep=0.754,
    jitter_sigma=0.106,
    gap_cv=5.04,
    parts=(
        (0.3137, 7.5862, 0.6312, 2.5429, 0.3577),
        (0.2074, 5.4053, 1.2462, 2.4374, 0.4025),
        (0.1766, 7.5951, 0.6471, 3.7349, 0.9005),
        (0.1466, 7.5009, 0.6576, 1.9899, 0.1723),
        (0.1065, 5.7901, 1.3039, 3.6614, 0.8814),
        (0.0492, 8.9105, 0.02, 2.7374, 0.7399),
    ),
    max_prompt=7437,
    max_response=1899,
    min_response=6,
)  # fmt: skip

TENANTS: Final = Tenants(
    rate_sigma_log10=1.136,
    rate_spread_log10=7.5,
    active_base=-0.484,
    active_slope=1.205,
    active_sigma=1.225,
    run_base=3.032,
    run_slope=0.945,
    cv_quantiles=(0.229, 0.88, 0.99, 1.028, 1.102, 1.226, 1.584, 1.952, 2.848, 4.896, 55.251),
    stray_quantiles=(0.101, 0.516, 0.661, 0.815, 0.954, 1.122, 1.298, 1.441, 1.6, 1.797, 3.12),
    stray_keep=0.863,
    daily_share=0.113,
)  # fmt: skip

TENANT_LENGTHS: Final = TenantLengths(
    prompt_log_mean=5.956,
    prompt_log_sigma=1.553,
    response_log_mean=4.247,
    response_log_sigma=1.98,
    correlation=0.39,
    prompt_sigma_quantiles=(0.0, 0.022, 0.067, 0.13, 0.202, 0.279, 0.365, 0.507, 0.659, 0.827, 1.977),
    response_sigma_quantiles=(0.0, 0.141, 0.233, 0.301, 0.399, 0.468, 0.553, 0.636, 0.777, 0.999, 3.099),
)  # fmt: skip
