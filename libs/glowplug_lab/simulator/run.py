"""State shared by all parts of a run."""

from itertools import cycle

from glowplug.domain.model import WeightsRef
from glowplug_lab.simulator.kernel import Kernel
from glowplug_lab.simulator.links import Links
from glowplug_lab.simulator.results import Results
from glowplug_lab.simulator.setup import ModelSetup, Setup, StartSeconds

SETTLE_S = 5.0  # nodes and routers report before the first request


def digest_of(weights: WeightsRef) -> str:
    return weights.digest


class Run:
    """`label` names the run in messages."""

    def __init__(self, setup: Setup, label: str = "a run") -> None:
        self.setup, self.label, self.began_s = setup, label, setup.began_at
        self.kernel = Kernel(self.began_s - SETTLE_S)
        self.links = Links(self.kernel)
        self.results = Results()
        self.models: dict[str, ModelSetup] = {one.model.key: one for one in setup.models}
        self.keys_of: dict[str, tuple[str, ...]] = {}  # by digest of weights
        for one in setup.models:
            digest = digest_of(one.model.weights)
            self.keys_of[digest] = (*self.keys_of.get(digest, ()), one.model.key)
        self._starts = {key: cycle(one.starts or (one.start,)) for key, one in self.models.items()}
        self._wakes = {key: cycle(one.wakes or (one.start,)) for key, one in self.models.items()}
        self._paces = {key: cycle(one.pace or ((1.0, 1.0),)) for key, one in self.models.items()}

    def start_of(self, model: ModelSetup) -> StartSeconds:
        """Measured starts repeat in turn."""
        return next(self._starts[model.model.key])

    def wake_of(self, model: ModelSetup) -> StartSeconds:
        """Measured swaps repeat in turn."""
        return next(self._wakes[model.model.key])

    def pace_of(self, model: ModelSetup) -> tuple[float, float]:
        """Factors on prefill and later tokens."""
        return next(self._paces[model.model.key])
