"""Fitted generator parameters, from generator_fitted.toml."""

import tomllib
from importlib import resources
from typing import Any, Final, NamedTuple


class Cycle(NamedTuple):
    """`weekday`, `weekend`: hourly rates (UTC) over the mean weekday hour. Deviations: log-AR(1) of `stray_sigma` over
    600 s windows, correlated by `stray_keep`, and `jitter_sigma` every 10 s. `parts`: share, mean and sigma of log
    prompt, mean and sigma of log response."""

    weekday: list[float]
    weekend: list[float]
    stray_sigma: float
    stray_keep: float
    jitter_sigma: float
    gap_cv: float
    parts: list[list[float]]
    max_prompt: int
    max_response: int
    min_response: int


class Tenants(NamedTuple):
    """With z, a client's standardised log10 rate: share of active windows = Phi(active_base + active_slope z + noise of
    active_sigma), mean windows of an active run = exp(run_base + run_slope x the argument of Phi). Quantiles are the 0,
    10 ... 100 % points over clients."""

    rate_sigma_log10: float
    active_base: float
    active_slope: float
    active_sigma: float
    run_base: float
    run_slope: float
    cv_quantiles: list[float]
    stray_quantiles: list[float]
    stray_keep: float
    daily_share: float  # of busy clients with a day-to-day correlation above 0.7


class TenantLengths(NamedTuple):
    """Medians are lognormal and correlated in prompt and response; requests vary by each client's own sigma."""

    prompt_log_mean: float
    prompt_log_sigma: float
    response_log_mean: float
    response_log_sigma: float
    correlation: float
    prompt_sigma_quantiles: list[float]
    response_sigma_quantiles: list[float]


_FITTED: Final[dict[str, Any]] = tomllib.loads(
    resources.files(__package__).joinpath("generator_fitted.toml").read_text(encoding="utf-8")
)
CONVERSATION, CODE = Cycle(**_FITTED["conversation"]), Cycle(**_FITTED["code"])
TENANTS, TENANT_LENGTHS = Tenants(**_FITTED["tenants"]), TenantLengths(**_FITTED["tenant_lengths"])
