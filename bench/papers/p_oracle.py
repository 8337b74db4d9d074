"""Search for the fewest instance-hours that hold an objective with all of the demand known beforehand, as the reference
for the scalers of P2m. Starts take as long, and windows are as wide, as for those.

    counts_w = ceil(tokens of window w / tokens an instance takes), then, run by run of the simulator:
    repair     one more in the windows about each minute that missed, until none does
    trim       one less at an end of some instances' lives, far from each other; taken back where a minute misses

The result is no bound: fewer may do. It is within a window at either end of each instance's life.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from bench.papers import p_preserve
from bench.papers.experiment import Outcome
from glowplug.controllers import operator
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World

WINDOW_S = 25.0
LEAD_S = 31.0  # a start: 30 s, and the time to its grant and to load weights from host memory
MOST = 8
MODEL = "llama-7b"
MINUTE_S = 60.0
APART = 7  # windows between two ends trimmed at once
MAX_REPAIRS, NUM_TRIMS = 12, 5


def demand(arrivals: Iterable[Arrival], profile: dict[str, int], seconds: float) -> list[float]:
    """Instances that each window's tokens require by Algorithm 2's three ratios, not rounded."""
    prompt, response = ([0.0] * math.ceil(seconds / WINDOW_S) for _ in range(2))
    for one in arrivals:
        number = int(one.at_s // WINDOW_S)
        if number < len(prompt):
            prompt[number] += one.prompt_tokens
            response[number] += one.response_tokens
    most = [profile[f"{kind}_per_s"] * WINDOW_S for kind in ("prompt", "response", "total")]
    return [
        max(here / one for here, one in zip((p, r, p + r), most, strict=True))
        for p, r in zip(prompt, response, strict=True)
    ]


def steps(counts: Sequence[int]) -> list[tuple[float, int]]:
    """(seconds, number of instances from then on): the most of the windows that a start begun now would serve."""
    ends = {number * WINDOW_S for number in range(len(counts))}
    found: list[tuple[float, int]] = []
    for at_s in sorted({0.0} | ends | {end - LEAD_S for end in ends if end > LEAD_S}):
        first, last = int(at_s // WINDOW_S), math.ceil((at_s + LEAD_S) / WINDOW_S + 1e-9)
        num = max(counts[first : max(last, first + 1)])
        if not found or found[-1][1] != num:
            found.append((at_s, num))
    return found


def follow(world: World, counts: Sequence[int]) -> None:
    """Change the model's least number as planned, by its operator, under a scaler that does nothing more."""
    model = world.models[MODEL].model

    def deploy(num: int) -> None:
        world.control.give("autoscaler", operator.Deploy(model=replace(model, min_instances=num)))

    for at_s, num in steps(counts):
        world.kernel.at(world.began_s + at_s + 0.01, deploy, num)


@dataclass(slots=True)
class Search:
    """The current plan, improved after each run."""

    run: Callable[[Sequence[int]], Outcome]
    objective_s: float
    demand: Sequence[float]
    counts: list[int] = field(init=False)
    kept: set[tuple[int, int]] = field(default_factory=set)  # (window, count): a smaller count missed there
    num_runs: int = 0

    def __post_init__(self) -> None:
        self.counts = [min(MOST, max(1, math.ceil(need - 1e-9))) for need in self.demand]

    def missed(self, outcome: Outcome) -> list[int]:
        """Minutes above the objective."""
        return [int(minute) for minute, mean in outcome["minutes"] if mean > self.objective_s]

    def fewest(self) -> Outcome:
        """Return the outcome of the best plan."""
        outcome = self._repaired()
        for number in range(NUM_TRIMS):
            if not self._trim(number):
                break
        outcome = self._repaired()
        outcome["num_runs"] = self.num_runs
        outcome["counts"] = list(self.counts)
        return outcome

    def _run(self) -> Outcome:
        self.num_runs += 1
        return self.run(self.counts)

    def _repaired(self) -> Outcome:
        outcome = self._run()
        for _ in range(MAX_REPAIRS):
            if not (missed := self.missed(outcome)):
                return outcome
            for number in {n for minute in missed for n in self._short(minute)}:
                self.counts[number] = min(MOST, self.counts[number] + 1)
            outcome = self._run()
        return outcome

    def _short(self, minute: int) -> list[int]:
        """Of the windows that can have caused a late minute, the two with the highest demand per instance."""
        first, last = ((minute + more) * MINUTE_S / WINDOW_S for more in (-0.5, 1.0))
        near = [n for n in range(max(0, int(first)), min(len(self.counts), math.ceil(last))) if self.counts[n] < MOST]
        return sorted(near, key=lambda n: self.demand[n] / self.counts[n], reverse=True)[:2]

    def _trim(self, number: int) -> bool:
        """Trim some ends, and take back those that make a minute miss."""
        cuts = self._ends(number)
        for at in cuts:
            self.counts[at] -= 1
        if not cuts:
            return False
        for minute in self.missed(self._run()):
            first, last = ((minute + more) * MINUTE_S / WINDOW_S for more in (-2.0, 1.0))
            back = [at for at in cuts if first <= at <= last] or cuts
            for at in back:
                self.counts[at] += 1
                self.kept.add((at, self.counts[at]))
            cuts = [at for at in cuts if at not in back]
        return True

    def _ends(self, number: int) -> list[int]:
        """Windows with more instances than a neighbour, not tried yet, `APART` from each other."""
        found: list[int] = []
        counts = [1, *self.counts, 1]
        order = range(len(self.counts)) if number % 2 == 0 else reversed(range(len(self.counts)))
        for at in order:
            here, beside = counts[at + 1], min(counts[at], counts[at + 2])
            if here > beside and (at, here) not in self.kept and all(abs(at - one) >= APART for one in found):
                found.append(at)
        return found


def fewest(
    seed: int, quick: bool, profile: dict[str, int], objective_s: float, given: Sequence[str], start: float = 1.15
) -> Outcome:
    """The outcome of the best plan for one service at a rate. The search begins with `start` of the profile."""

    def run(counts: Sequence[int]) -> Outcome:
        found, world = p_preserve.world_of("oracle", seed, quick, *given, lead_s=p_preserve.LEARN_S)
        follow(world, counts)
        return p_preserve.outcome_of(found, world, p_preserve.LEARN_S)

    found, _ = p_preserve.world_of("oracle", seed, quick, *given, lead_s=p_preserve.LEARN_S)
    needs = demand(found.arrivals(seed), {kind: round(most * start) for kind, most in profile.items()}, found.seconds)
    return Search(run, objective_s, needs).fewest()
