"""Nothing cold can be started while the bus stores no events: who would wait for a start is told so."""

from glowplug.controllers.effects import Effect
from glowplug.controllers.router.failures import coded
from glowplug.controllers.router.messages import BusRefuses
from glowplug.domain.errors import GlowplugError, NoCapacity
from glowplug.domain.model import Model


class Starts:
    """Whether a start can be asked for. `grace_s`: how long requests that are held already wait for the bus."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._reason, self._since = "", 0.0

    def bus_says(self, stimulus: BusRefuses, now_s: float) -> list[Effect]:
        """The newest word counts; the time runs from the first refusal."""
        if stimulus.reason and not self._reason:
            self._since = now_s
        self._reason = stimulus.reason
        return []

    def refusal(self, model: Model) -> GlowplugError | None:
        """What a cold model answers, of which no instance is on its way."""
        if not self._reason:
            return None
        text = f"The model `{model.name}` is not running and cannot be started now: {self._reason}."
        return coded(NoCapacity(text, retry_after_s=self._grace_s), "control_plane_unavailable")

    def overdue(self, model: Model, now_s: float) -> GlowplugError | None:
        """The same for those who are held, once the grace is over."""
        return self.refusal(model) if now_s - self._since >= self._grace_s else None
