"""Scaling policies asked again and again, as by the autoscaler."""

from dataclasses import replace
from typing import Any

from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.snapshot import Forecast, ModelLoad, Outlook
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import ScalingView
from tests.fleet_builder import a_model, an_instance


def ready(num: int, *, first: int = 1, **fields: Any) -> list[Instance]:
    """READY instances i-1, i-2, ..., long up."""
    given = {"created_at": 0.0, "ready_at": 0.0, "max_concurrency": 8} | fields
    return [an_instance(f"i-{n}", **given) for n in range(first, first + num)]


def starting(instance_id: str = "i-9", **fields: Any) -> Instance:
    return an_instance(instance_id, state=InstanceState.STARTING, **fields)


def load(waiting: int = 0, last_active_at: float = 0.0, arrived: int = 0, **running: int) -> ModelLoad:
    """`running`: requests by instance, as `i1=3`."""
    by_instance = {f"i-{name[1:]}": count for name, count in running.items()}
    return ModelLoad(
        num_waiting=waiting,
        num_in_flight=sum(by_instance.values()),
        last_active_at=last_active_at,
        in_flight_by_instance=by_instance,
        num_arrived=arrived,
    )


def outlooks(load: ModelLoad, **peaks: tuple[float, float]) -> ModelLoad:
    """The load with (peak, share above) by instance, as `i1=(0.99, 0.2)`."""
    found = {f"i-{name[1:]}": Outlook(peak_ratio=peak, over_share=over) for name, (peak, over) in peaks.items()}
    return replace(load, outlook_by_instance=found)


def a_forecast(prompt: float = 0.0, response: float = 0.0, **fields: Any) -> Forecast:
    given: dict[str, Any] = {
        "made_at": 100.0, "window_s": 100.0, "starts_at": 100.0, "concurrency_mean": 0.0, "concurrency_peak": 0.0,
        "prompt_tokens": prompt, "response_tokens": response,
    }  # fmt: skip
    return Forecast(**(given | fields))


class Asked:
    def __init__(self, policy: Any, **model: Any) -> None:
        self.policy, self.state = policy, None
        self.model = a_model(**({"max_concurrency": 8, "max_instances": 16, "keep_alive_s": 30.0} | model))

    def __call__(
        self,
        now_s: float,
        load: ModelLoad,
        instances: list[Instance] | None = None,
        *,
        params: Any = None,
        **fields: Any,
    ) -> ScaleDecision:
        """`fields`: further ones of the ScalingView."""
        view = ScalingView(now_s=now_s, model=self.model, instances=tuple(instances or ()), load=load, **fields)
        decision, self.state = self.policy(view, self.state, **({"params": params} if params else {}))
        assert decision.reason, "every decision says why"
        return decision
