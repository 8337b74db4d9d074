"""Generated traffic in place of a trace: seeded, and fitted to public traces (see generator_fitted.py).

`service`: daily and weekly cycle, rate deviations, bursts, a mixture of lengths. `fleet`: tenants with popularity over
orders of magnitude, idle tails, own bursts and lengths. Arrivals are a renewal process in operational time with Gamma
gaps; the first is the rest of a gap, so that runs do not begin with a burst. `LABEL` begins generated model names.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import Final, NamedTuple

from glowplug.domain.units import DAY_S
from glowplug_lab.simulator.workload import generator_fitted as fitted
from glowplug_lab.simulator.workload.arrival import Arrival, merge
from glowplug_lab.simulator.workload.generator_fitted import Cycle

LABEL: Final = "generated"
BIN_S: Final = 10.0
WINDOW_S: Final = 600.0
NOON_S: Final = 43_200.0  # of a Monday
_NORMAL: Final = NormalDist()
WEEK_S: Final = 7 * DAY_S


class Span(NamedTuple):
    """`rate` requests a second in `[from_s, from_s + width_s)`."""

    from_s: float
    width_s: float
    rate: float


def renewal(spans: Iterable[Span], cv: float, chance: Random) -> Iterator[float]:
    """Arrival times over adjacent spans. Raises ValueError for a negative cv."""
    if not cv >= 0:
        raise ValueError(f"arrivals with CV {cv}")
    shape = 1 / max(cv * cv, 1e-4)  # a clock below CV 0.01
    wait = chance.random() * chance.gammavariate(shape + 1, 1 / shape)
    for span in spans:
        if span.rate <= 0:
            continue
        left = span.rate * span.width_s
        while wait < left:
            left -= wait
            yield span.from_s + span.width_s - left / span.rate
            wait = chance.gammavariate(shape, 1 / shape)
        wait -= left


def hours(kind: Cycle, at_s: float) -> float:
    """Relative to the mean weekday rate, `at_s` after a Monday's 00:00, interpolated between mid-hours."""
    middle, within = divmod((at_s - 1800.0) % WEEK_S, 3600.0)

    def at(hour: int) -> float:
        day, of_day = divmod(hour, 24)
        return (kind.weekend if day % 7 >= 5 else kind.weekday)[of_day]

    share = within / 3600.0
    return at(int(middle)) * (1 - share) + at(int(middle) + 1) * share


def stray(sigma: float, keep: float, chance: Random) -> Iterator[float]:
    """One factor per window, with mean 1: exp of an AR(1) process with stationary deviation `sigma`."""
    value = chance.gauss(0.0, 1.0)
    step = math.sqrt(max(0.0, 1 - keep * keep))
    while True:
        yield math.exp(sigma * value - sigma * sigma / 2)
        value = keep * value + step * chance.gauss(0.0, 1.0)


def between(quantiles: Sequence[float], share: float) -> float:
    """Quantile from evenly spaced 0 ... 100 % points."""
    at = share * (len(quantiles) - 1)
    low = min(int(at), len(quantiles) - 2)
    return quantiles[low] + (at - low) * (quantiles[low + 1] - quantiles[low])


Draw = Callable[[Random], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """`start_s` counts from a Monday's 00:00 UTC."""

    seconds: float
    start_s: float = NOON_S

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf or not 0 <= self.start_s < math.inf:
            raise ValueError(f"seconds: {self.seconds} s of traffic from {self.start_s} s on")


def service(
    kind: Cycle, seed: int, rps: float, seconds: float, *, model: str, start_s: float = NOON_S, cv: float | None = None
) -> Iterator[Arrival]:
    """`rps` a second on average, times from 0: chat (`CONVERSATION`) or code completion (`CODE`: long prompts, short
    responses, a quiet weekend). `cv` defaults to the fitted trace's. Raises ValueError unless rate and time are above
    0."""
    when = When(seconds=seconds, start_s=start_s)
    if not 0 < rps < math.inf:
        raise ValueError(f"rps: {rps} requests a second")
    rates, gaps, tokens = (Random(f"{seed}/{model}/{part}") for part in ("rates", "gaps", "tokens"))
    draw = lengths(kind)
    times = renewal(_cycle(kind, rps, when, rates), kind.gap_cv if cv is None else cv, gaps)
    return (Arrival(at_s, model, *draw(tokens)) for at_s in times)


def lengths(kind: Cycle) -> Draw:
    upto = list(accumulate(part[0] for part in kind.parts))

    def draw(chance: Random) -> tuple[int, int]:
        ((_, prompt, prompt_sigma, response, response_sigma),) = chance.choices(kind.parts, cum_weights=upto)
        prompt_tokens = max(1, round(math.exp(chance.gauss(prompt, prompt_sigma))))
        response_tokens = max(kind.min_response, round(math.exp(chance.gauss(response, response_sigma))))
        return min(kind.max_prompt, prompt_tokens), min(kind.max_response, response_tokens)

    return draw


def _cycle(kind: Cycle, rps: float, when: When, chance: Random) -> Iterator[Span]:
    """10 s bins, scaled to a mean of `rps`."""
    num = math.ceil(when.seconds / BIN_S)
    sampled = range(0, num, max(1, num // 10_000))
    shape = [hours(kind, when.start_s + (at + 0.5) * BIN_S) for at in sampled]
    scale = rps / (math.fsum(shape) / len(shape))
    windows = stray(kind.stray_sigma, kind.stray_keep, chance)
    jitter = stray(kind.jitter_sigma, 0.0, chance)
    factor = 1.0
    for at in range(num):
        from_s = at * BIN_S
        if at % round(WINDOW_S / BIN_S) == 0:
            factor = next(windows)
        share = hours(kind, when.start_s + from_s + BIN_S / 2)
        yield Span(from_s, min(BIN_S, when.seconds - from_s), scale * share * factor * next(jitter))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`rate`: long-run mean; `active`: share of windows with a request."""

    name: str
    rate: float
    active: float
    run_windows: float
    cv: float
    stray_sigma: float
    daily: bool
    prompt_log: float
    prompt_sigma: float
    response_log: float
    response_sigma: float


def tenants(seed: int, num_models: int, rps: float, names: Sequence[str] = ()) -> list[Tenant]:
    """Return models, the most popular first. Popularity is fixed (even steps through the fitted distribution), the rest
    is drawn. Raises ValueError without a model or rate, or with too few `names`."""
    if num_models < 1 or not 0 < rps < math.inf:
        raise ValueError(f"num_models: {num_models} models with {rps} requests a second in all")
    if names and len(names) < num_models:
        raise ValueError(f"names: {len(names)} names for {num_models} of {LABEL}")
    names = names or [f"{LABEL}-{rank:0{len(str(num_models - 1))}d}" for rank in range(num_models)]
    chance = Random(f"{seed}/tenants")
    scores = [_NORMAL.inv_cdf(1 - (rank + 0.5) / num_models) for rank in range(num_models)]
    weights = [10 ** (fitted.TENANTS.rate_sigma_log10 * z) for z in scores]
    scale = rps / math.fsum(weights)
    return [_tenant(name, z, weight * scale, chance) for name, z, weight in zip(names, scores, weights, strict=False)]


def _tenant(name: str, z: float, rate: float, chance: Random) -> Tenant:
    found, tokens = fitted.TENANTS, fitted.TENANT_LENGTHS
    probit = found.active_base + found.active_slope * z + found.active_sigma * chance.gauss(0.0, 1.0)
    first, second = chance.gauss(0.0, 1.0), chance.gauss(0.0, 1.0)
    along = tokens.correlation * first + math.sqrt(1 - tokens.correlation**2) * second
    return Tenant(
        name=name,
        rate=rate,
        active=_NORMAL.cdf(probit),
        run_windows=max(1.0, math.exp(found.run_base + found.run_slope * probit)),
        cv=between(found.cv_quantiles, chance.random()),
        stray_sigma=between(found.stray_quantiles, chance.random()),
        daily=chance.random() < found.daily_share,
        prompt_log=tokens.prompt_log_mean + tokens.prompt_log_sigma * first,
        prompt_sigma=between(tokens.prompt_sigma_quantiles, chance.random()),
        response_log=tokens.response_log_mean + tokens.response_log_sigma * along,
        response_sigma=between(tokens.response_sigma_quantiles, chance.random()),
    )


def fleet(
    seed: int,
    num_models: int,
    rps: float,
    seconds: float,
    *,
    start_s: float = NOON_S,
    names: Sequence[str] = (),
    max_prompt: int = 8192,
    max_response: int = 2048,
) -> Iterator[Arrival]:
    """One provider's clients, `rps` a second in all on the long-run average (an hour may bring half or twice, as in the
    traces). Raises ValueError as `tenants` does."""
    when = When(seconds=seconds, start_s=start_s)
    streams = [_of(t, seed, when, max_prompt, max_response) for t in tenants(seed, num_models, rps, names)]
    return merge(*streams)


def _of(tenant: Tenant, seed: int, when: When, max_prompt: int, max_response: int) -> Iterator[Arrival]:
    rates, gaps, tokens = (Random(f"{seed}/{tenant.name}/{part}") for part in ("rates", "gaps", "tokens"))
    for at_s in renewal(_windows(tenant, when, rates), tenant.cv, gaps):
        prompt = round(math.exp(tokens.gauss(tenant.prompt_log, tenant.prompt_sigma)))
        response = round(math.exp(tokens.gauss(tenant.response_log, tenant.response_sigma)))
        yield Arrival(at_s, tenant.name, min(max_prompt, max(1, prompt)), min(max_response, max(1, response)))


def _windows(tenant: Tenant, when: When, chance: Random) -> Iterator[Span]:
    """600 s windows in active and idle runs."""
    ends = 1 / tenant.run_windows
    begins = min(1.0, ends * tenant.active / max(1e-9, 1 - tenant.active))
    active = chance.random() < tenant.active
    factors = stray(tenant.stray_sigma, fitted.TENANTS.stray_keep, chance)
    from_s = 0.0
    while from_s < when.seconds:
        factor = next(factors)
        if tenant.daily:
            factor *= hours(fitted.CONVERSATION, when.start_s + from_s + WINDOW_S / 2)
        rate = tenant.rate / tenant.active * factor if active else 0.0
        yield Span(from_s, min(WINDOW_S, when.seconds - from_s), rate)
        active = chance.random() >= ends if active else chance.random() < begins
        from_s += WINDOW_S


def dealt_functions(num_models: int, num_functions: int = 46_413) -> list[float]:
    """Shares of models that get functions round robin, in a fixed order independent of popularity.

    HydraServe section 8.3 maps the functions of Azure's 2019 trace (Shahrad et al., ATC 2020; 46,413 a day) in this
    way. Popularity is lognormal through two published points (section 3.3): 45 % are invoked once an hour or less on
    average, 81 % once a minute or less. Raises ValueError for no model or fewer functions than models.
    """
    if not 1 <= num_models <= num_functions:
        raise ValueError(f"{num_functions} functions for {num_models} models")
    sigma = math.log(60) / (_NORMAL.inv_cdf(0.81) - _NORMAL.inv_cdf(0.45))
    upto = [1 - (rank + 0.5) / num_functions for rank in range(num_functions)]
    weights = [math.exp(sigma * _NORMAL.inv_cdf(share)) for share in upto]
    Random(num_functions).shuffle(weights)
    dealt = [math.fsum(weights[first::num_models]) for first in range(num_models)]
    total = math.fsum(dealt)
    return [weight / total for weight in dealt]
