"""Load-aware routing: the instance with the least to prefill, to generate, and to fear for its KV cache.

Paper: PreServe section 4.3.3. For a request of P prompt tokens and an expected response of D, and each instance i with
`queued` tokens to prefill, `current` tokens to generate, KV capacity M and anticipated peak U over the next l steps if
the request went there:

    L_i = (queued_i + P) + (current_i + D) + beta max(0, U_i - T_mem) M_i,    the least L_i is chosen

beta = 1, T_mem = 0.8, l = 100 (erratum E35: the penalty is in tokens, so it adds; M is each instance's own).

Departure: P and D are the same for every instance and the penalty is never negative, so instances are visited in the
order of queued + current, and the search ends at the first whose sum alone exceeds the best load found. The choice is
the paper's; its cost does not grow with the number of instances. Ties break by instance id.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.prediction.preserve_anticipator import LookAhead


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAwareParams:
    memory_ratio: float = 0.8  # T_mem
    penalty: float = 1.0  # beta
    num_steps: int = 100  # l


@dataclass(slots=True)
class InstanceLoad:
    """What one instance has to do. `tokens` = queued to prefill + still to generate."""

    instance_id: str
    look_ahead: LookAhead
    queued_tokens: int = 0
    current_tokens: int = 0
    has_room: bool = True  # False: at its max_concurrency, or not serving

    @property
    def tokens(self) -> int:
        return self.queued_tokens + self.current_tokens


def load_of(target: InstanceLoad, prompt_tokens: int, expected_tokens: int, params: LoadAwareParams) -> float:
    """L_i, in tokens. The steps ahead are only looked at where they could cost a penalty."""
    look = target.look_ahead
    load = float(target.tokens + prompt_tokens + expected_tokens)
    newcomer = prompt_tokens + min(expected_tokens, params.num_steps) - 1
    if look.at_most(params.num_steps) + newcomer <= params.memory_ratio * look.kv_tokens:
        return load
    peak = look.peak_ratio(params.num_steps, prompt_tokens, expected_tokens)
    return load + params.penalty * max(0.0, peak - params.memory_ratio) * look.kv_tokens


def route(
    targets: Iterable[InstanceLoad],
    prompt_tokens: int,
    expected_tokens: int,
    params: LoadAwareParams = LoadAwareParams(),
) -> RouteDecision:
    """The instance with the least load; `instance_id` is "" when none has room. `targets` in any order."""
    return _least(sorted(targets, key=_order), prompt_tokens, expected_tokens, params)


class LoadOrder:
    """Instances kept in the order of their load while requests come and go: what `route` sorts, kept sorted."""

    def __init__(self, params: LoadAwareParams = LoadAwareParams()) -> None:
        self.params = params
        self._order: list[tuple[int, str]] = []
        self._loads: dict[str, InstanceLoad] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._loads

    def put(self, load: InstanceLoad) -> None:
        """Add an instance, or take in what changed of it through anything but `moved`."""
        self.drop(load.instance_id)
        self._loads[load.instance_id] = load
        insort(self._order, _order(load))

    def drop(self, instance_id: str) -> None:
        """Forget an instance. Unknown ids are none of ours."""
        load = self._loads.pop(instance_id, None)
        if load is not None:
            del self._order[bisect_left(self._order, _order(load))]

    def moved(self, instance_id: str, *, queued: int = 0, current: int = 0) -> None:
        """Its tokens changed by so many."""
        load = self._loads.get(instance_id)
        if load is None:
            return
        del self._order[bisect_left(self._order, _order(load))]
        load.queued_tokens += queued
        load.current_tokens += current
        insort(self._order, _order(load))

    def route(self, prompt_tokens: int, expected_tokens: int) -> RouteDecision:
        """As `route` over every instance."""
        return _least((self._loads[name] for _, name in self._order), prompt_tokens, expected_tokens, self.params)


def _order(load: InstanceLoad) -> tuple[int, str]:
    return (load.tokens, load.instance_id)


def _least(
    ordered: Iterable[InstanceLoad] | Iterator[InstanceLoad], prompt: int, expected: int, params: LoadAwareParams
) -> RouteDecision:
    best: InstanceLoad | None = None
    least = 0.0
    for target in ordered:
        if not target.has_room:
            continue
        if best is not None and target.tokens + prompt + expected >= least:
            break
        load = load_of(target, prompt, expected, params)
        if best is None or load < least:
            best, least = target, load
    if best is None:
        return RouteDecision("", "every instance is at its max_concurrency")
    return RouteDecision(best.instance_id, f"least anticipated load: {least:.0f} tokens")
