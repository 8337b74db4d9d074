"""Reasons not to wait for a start: the last one failed hopelessly, or the bus cannot carry its command."""

from dataclasses import dataclass
from typing import Final

from glowplug.controllers.backoff import backoff_s
from glowplug.controllers.effects import Effect
from glowplug.controllers.router.messages import BusRefuses
from glowplug.controllers.router.overload import retry_after_s
from glowplug.domain.errors import GlowplugError, NoCapacity, WeightsUnavailable
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model

NEXT_TRY_S = 600.0  # a failure so soon after another one is a further try of the same start
SUSPENDED_RETRY_S = 60.0  # a person decides when, so no time can be computed
MAX_MEMORY_S: Final = 30.0  # the autoscaler pauses no longer between failed starts
HOPELESS_CODES = (  # waiting would not help
    "weights_corrupt",
    "weights_unavailable",
    "no_space",
    "no_capacity",
    "engine_misconfigured",  # the next start would get the same arguments
)
HOPELESS_AGAIN: Final = ("engine_failed", "start_timeout")  # may pass, unless the next start fails too


@dataclass(frozen=True, slots=True)
class Failure:
    code: str
    message: str
    failed_at: float
    tries_left: int = 0  # other nodes for the start
    tried_on: frozenset[str] = frozenset()  # nodes
    num: int = 1  # starts that failed, one after the other, on every node to try

    @property
    def is_hopeless(self) -> bool:
        is_again = self.num > 1 and self.code in HOPELESS_AGAIN
        return (is_again or self.code in HOPELESS_CODES) and not self.tries_left


class Failures:
    """The last failure of each model. A hopeless one answers new requests at once for `memory_s`, twice as long after
    each further one; then a request may wait for the next start."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._by_model: dict[str, Failure] = {}

    def remember(self, instance: Instance, code: str, message: str, now_s: float) -> Failure:
        """Remember a model's newest failure; another kind without tries left does not replace a hopeless one while
        that answers new requests. Starts under way at the failure before it, and engines that served, do not count
        as further failed starts. A dormant one that fails as it wakes had started well: the count begins anew."""
        model_key, tries_left = instance.model_key, instance.tries_left
        known = self._by_model.get(model_key)
        tried_on = frozenset({instance.node_id})
        if known is not None and known.tries_left and now_s - known.failed_at < NEXT_TRY_S:
            tried_on |= known.tried_on
        if len(tried_on) > 1:
            message = f"{message} (it was tried on {len(tried_on)} nodes)"
        is_further = known is None or not known.num or instance.created_at > known.failed_at
        num = (known.num if known else 0) + (is_further and not (instance.ready_at or tries_left))
        if instance.source:
            num = 0
        failure = Failure(code or code_in(message), message, now_s, tries_left, tried_on, num)
        stays = known is not None and known.is_hopeless and now_s - known.failed_at <= self._kept_s(known)
        if not stays or failure.is_hopeless or tries_left:
            self._by_model[model_key] = failure
        return failure

    def forget(self, model_key: str) -> None:
        self._by_model.pop(model_key, None)

    def of(self, model_key: str) -> Failure | None:
        return self._by_model.get(model_key)

    def refusal(self, model_key: str, now_s: float) -> GlowplugError | None:
        failure = self._by_model.get(model_key)
        if failure is None or not failure.is_hopeless:
            return None
        left_s = failure.failed_at + self._kept_s(failure) - now_s
        return self.error(failure, left_s) if left_s > 0 else None

    def _kept_s(self, failure: Failure) -> float:
        return backoff_s(failure.num, self._memory_s, max(self._memory_s, MAX_MEMORY_S))

    def error(self, failure: Failure, retry_s: float | None = None) -> GlowplugError:
        kind = NoCapacity if failure.code == NoCapacity.code else WeightsUnavailable
        after_s = retry_after_s(self._kept_s(failure) if retry_s is None else retry_s)
        return coded(kind(failure.message, retry_after_s=after_s), failure.code)


class BusWatch:
    """Refusal of cold requests once the bus has stored no events for `grace_s`, longer than its servers elect."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._reason, self._since = "", 0.0

    def changed(self, stimulus: BusRefuses, now_s: float) -> list[Effect]:
        if stimulus.reason and not self._reason:
            self._since = now_s
        self._reason = stimulus.reason
        return []

    def refusal(self, model: Model, now_s: float) -> GlowplugError | None:
        if not self._reason or now_s - self._since < self._grace_s:
            return None
        text = f"The model `{model.name}` is not running and cannot be started now: {self._reason}."
        return coded(NoCapacity(text, retry_after_s=self._grace_s), "control_plane_unavailable")


def coded(error: GlowplugError, code: str) -> GlowplugError:
    error.code = code
    return error


def code_in(reason: str) -> str:
    """Return the error code that begins a reason ("weights_corrupt: sha256 ..."), else engine_failed."""
    head = reason.partition(":")[0].strip()
    return head if head in HOPELESS_CODES else "engine_failed"


def suspended(model: Model) -> GlowplugError:
    text = f"The model `{model.name}` has been drained by its operator."
    return coded(NoCapacity(text, retry_after_s=SUSPENDED_RETRY_S), "model_suspended")
