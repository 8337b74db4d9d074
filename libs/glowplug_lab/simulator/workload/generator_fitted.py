"""The fitted parameters of the generator, from generator_fitted.toml, as typed records."""

import tomllib
from importlib import resources
from typing import Any, Final, NamedTuple


class Cycle(NamedTuple):
    """Parameters of one service. `weekday` and `weekend`: the rate of each of 24 hours (UTC) over the mean weekday
    hour. The rate strays from them by a log-AR(1) of `stray_sigma` over windows of 600 s, correlated by `stray_keep`,
    and by `jitter_sigma` every 10 s. `parts`: share, mean and sigma of log prompt, mean and sigma of log response."""

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
    """Parameters of the clients of one provider. With z, a client's standardised log10 rate: share of active windows =
    Phi(active_base + active_slope z + noise of active_sigma), mean windows of one active run = exp(run_base + run_slope
    x the argument of Phi). Quantiles are the 0, 10 ... 100 % points over clients."""

    rate_sigma_log10: float
    active_base: float
    active_slope: float
    active_sigma: float
    run_base: float
    run_slope: float
    cv_quantiles: list[float]
    stray_quantiles: list[float]
    stray_keep: float
    daily_share: float  # of busy clients with a correlation above 0.7 to the day before


class TenantLengths(NamedTuple):
    """Parameters of clients' lengths. The medians of clients are lognormal and correlated in prompt and response; each
    client's requests vary around them by a sigma of its own."""

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
