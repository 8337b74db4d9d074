"""Proactive scaling: instances for the tokens the next window will bring, put right as the window goes.

Paper: PreServe sections 4.1 and 4.3.2, Algorithms 1 and 2. For the window to come, with P prompt and D response tokens
predicted and mu_p, mu_d, mu_t the most an instance has been seen to take without missing an objective:

    N = ceil( max(P / mu_p, D / mu_d, (P + D) / mu_t) ), at least 1

Within a window: one more instance for each whose anticipated KV use exceeds 95 % in more than a tenth of the next l
steps; and once a window, if every instance stays below 30 % over all of them, N_c - ceil(sum max U / T_mem) fewer.

Departures: an instance that is too full has been answered for `again_s`, and what is on its way up answers one, so
that neither a figure that flickers nor a slow start brings a crowd. A window begins with no fewer than run while one
of them is too full or was a moment ago, and within it nobody goes whom the forecast takes: with windows about as long
as a start, what one takes away the next one waits for (`literal_windows=True` does both as printed). The ceiling and
the floor of 1 are ours (erratum E32); mu is per instance, from windows in which all requests met their objectives, as
`capacity_of` says (E31); the count of the way down reads as above, at least one instance stays (E36). With no
prediction (`predicted` None) only the second half acts, and the reason says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from glowplug.domain.phrasing import counted, listed
from glowplug.domain.snapshot import Forecast, Outlook
from glowplug.policies.prediction.port import WindowTotals
from glowplug.policies.prediction.preserve_anticipator import MEMORY_RATIO, NUM_STEPS, OVERLOAD_RATIO, OVERLOAD_SHARE

Outlooks = Sequence[tuple[str, Outlook]]  # what the anticipator of each instance sees over the next steps, by its id


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The most tokens per second one instance has taken in a clean window; 0 while none has been seen."""

    prompt_per_s: float = 0.0  # mu_p
    response_per_s: float = 0.0  # mu_d
    total_per_s: float = 0.0  # mu_t

    @classmethod
    def of(cls, known: Forecast) -> "Capacity":
        """As a forecast brings it."""
        return cls(prompt_per_s=known.prompt_per_s, response_per_s=known.response_per_s, total_per_s=known.total_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerParams:
    overload_ratio: float = OVERLOAD_RATIO
    overload_share: float = OVERLOAD_SHARE
    idle_ratio: float = 0.30
    memory_ratio: float = MEMORY_RATIO  # T_mem
    num_steps: int = NUM_STEPS  # l
    again_s: float = 30.0  # one that is still too full after this brings another
    literal_windows: bool = False  # a window begins with its plan whoever is too full, and goes below it when calm


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """What the scaler remembers of one model."""

    window: int = -1  # the window last begun
    shrunk: bool = False  # whether this window's one way down within it has been used
    num_planned: int = 0
    num_forecast: int = 0  # of them, what the forecast took; 0: there was none
    answered: Mapping[str, float] = field(default_factory=dict)  # instance that was too full -> when one was added


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How many instances there should be, and why. `is_cold`: no plan of tokens says so, only what the look-ahead
    adds."""

    num_wanted: int
    reason: str
    is_cold: bool = False


def tokens_of(predicted: Forecast) -> str:
    """The tokens of a forecast, as a part of a sentence."""
    return f"{predicted.prompt_tokens:.0f} prompt and {predicted.response_tokens:.0f} response tokens"


def capacity_of(known: Capacity, window: WindowTotals, num_instances: float, *, is_clean: bool) -> Capacity:
    """mu after one more window (Algorithm 1, lines 6-8): tokens per second and instance, where all met their SLO."""
    if not is_clean or num_instances <= 0 or window.window_s <= 0:
        return known
    scale = 1 / (window.window_s * num_instances)
    prompt, response = window.prompt_tokens * scale, window.response_tokens * scale
    return Capacity(
        prompt_per_s=max(known.prompt_per_s, prompt),
        response_per_s=max(known.response_per_s, response),
        total_per_s=max(known.total_per_s, prompt + response),
    )


def instances_for(predicted: Forecast, capacity: Capacity) -> int:
    """N of Algorithm 2, line 5."""
    if predicted.window_s <= 0:
        raise ValueError(f"a window of {predicted.window_s} s")
    prompt, response = predicted.prompt_tokens / predicted.window_s, predicted.response_tokens / predicted.window_s
    needs = (
        (prompt, capacity.prompt_per_s),
        (response, capacity.response_per_s),
        (prompt + response, capacity.total_per_s),
    )
    return max(1, *(math.ceil(need / most - 1e-9) if most > 0 else 1 for need, most in needs))


def overloaded(
    outlooks: Outlooks,
    answered: Mapping[str, float],
    num_coming: int,
    now_s: float,
    params: ScalerParams = ScalerParams(),
) -> tuple[list[str], dict[str, float]]:
    """Instances that will be too full and have had nothing added for it yet, and who has been answered by now."""
    recent = {i: at for i, at in answered.items() if now_s - at < params.again_s}
    hot = sorted(i for i, outlook in outlooks if outlook.over_share > params.overload_share and i not in recent)
    num_answers = max(0, num_coming - len(recent))  # on their way up, and nobody's answer so far
    return hot[num_answers:], recent | dict.fromkeys(hot, now_s)


def scale(
    num_running: int,
    window: int,
    predicted: Forecast | None,
    capacity: Capacity,
    outlooks: Outlooks,
    state: ScalerState,
    params: ScalerParams = ScalerParams(),
    *,
    num_coming: int = 0,
    now_s: float = 0.0,
) -> tuple[Target, ScalerState]:
    """The number of instances one model should have now. `num_running` counts the `num_coming`, not those draining;
    `window` is the number of the present window; `predicted` is what it will bring."""
    fresh, answered = overloaded(outlooks, state.answered, num_coming, now_s, params)
    if window != state.window:
        state = ScalerState(window=window, num_planned=num_running, answered=state.answered)
        if predicted is not None and capacity != Capacity():
            planned = instances_for(predicted, capacity)
            wanted, why = planned, f"{tokens_of(predicted)} are expected in this window"
            if answered and planned < num_running + len(fresh) and not params.literal_windows:
                wanted, state = num_running + len(fresh), replace(state, answered=answered)
                why = f"{why}, and {counted(len(answered), 'instance')} will be too full or was a moment ago"
            return Target(num_wanted=wanted, reason=why), replace(state, num_planned=wanted, num_forecast=planned)
    state = replace(state, answered=answered)
    if fresh:
        state = replace(state, num_planned=max(num_running, state.num_planned) + len(fresh))
        why = f"{listed(sorted(fresh))} will fill more than {params.overload_ratio:.0%} of the KV cache"
        return Target(num_wanted=state.num_planned, reason=why), state
    calm = outlooks and all(o.peak_ratio < params.idle_ratio for _, o in outlooks)
    if calm and not state.shrunk and num_running > 1:
        least = 1 if params.literal_windows else max(1, state.num_forecast)
        wanted = max(least, math.ceil(sum(o.peak_ratio for _, o in outlooks) / params.memory_ratio))
        if wanted < num_running:
            why = f"every instance stays below {params.idle_ratio:.0%} of its KV cache"
            return Target(num_wanted=wanted, reason=why), replace(state, shrunk=True, num_planned=wanted)
    why = "nothing is predicted, and no instance is too full or too empty"
    if predicted is not None:
        why = "the plan of this window stands"
    return Target(num_wanted=state.num_planned, reason=why), state
