"""What every part of one run shares: its clock, its links, its models and its results. It knows none of the parts."""

from itertools import cycle

from glowplug.domain.model import WeightsRef
from glowplug.simulator.kernel import Kernel
from glowplug.simulator.links import Links
from glowplug.simulator.results import Results
from glowplug.simulator.setup import ModelSetup, Setup, StartSeconds

SETTLE_S = 5.0  # nodes and routers have spoken before the first request comes


def digest_of(weights: WeightsRef) -> str:
    """The region of a set of weights."""
    return weights.digest


class Run:
    """One run of a `setup`. `label` names it in what a broken invariant says."""

    def __init__(self, setup: Setup, label: str = "a run") -> None:
        self.setup, self.label, self.began_s = setup, label, setup.began_at
        self.kernel = Kernel(self.began_s - SETTLE_S)
        self.links = Links(self.kernel)
        self.results = Results()
        self.models: dict[str, ModelSetup] = {one.model.key: one for one in setup.models}
        self.keys_of: dict[str, tuple[str, ...]] = {}  # digest of weights -> models they are of
        for one in setup.models:
            digest = digest_of(one.model.weights)
            self.keys_of[digest] = (*self.keys_of.get(digest, ()), one.model.key)
        self._starts = {key: cycle(one.starts or (one.start,)) for key, one in self.models.items()}
        self._wakes = {key: cycle(one.wakes or (one.start,)) for key, one in self.models.items()}
        self._paces = {key: cycle(one.pace or ((1.0, 1.0),)) for key, one in self.models.items()}

    def start_of(self, model: ModelSetup) -> StartSeconds:
        """What the next start of a model takes: as its starts were measured, one after the other."""
        return next(self._starts[model.model.key])

    def wake_of(self, model: ModelSetup) -> StartSeconds:
        """What the next time takes that an engine of a model leaves its GPUs and comes back."""
        return next(self._wakes[model.model.key])

    def pace_of(self, model: ModelSetup) -> tuple[float, float]:
        """How many times as long as its costs say the next request of a model takes: its prompt, its later tokens."""
        return next(self._paces[model.model.key])
