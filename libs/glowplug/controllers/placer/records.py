"""Decision records of placements, as `why` prints them."""

from collections.abc import Mapping

from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.placement import Placement
from glowplug.domain.decision import DecisionRecord, Rival


class Records:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def of(
        self,
        placement: Placement,
        kind: str,
        reason: str,
        rivals: tuple[Rival, ...],
        now_s: float,
        chosen: str = "",
        figures: Mapping[str, float | int | str] | None = None,
    ) -> DecisionRecord:
        """Record a decision at the placement's GPU. `figures`: more inputs."""
        command, expected = placement.command, placement.sent.expected if placement.sent else None
        inputs: dict[str, float | int | str] = {
            "need_bytes": command.model.memory_bytes,
            "waited_s": round(now_s - command.wanted_at, 4),
            "engine": command.model.engine,
            "asked_because": command.reason,
            **(figures or {}),
        }
        if expected is not None:
            inputs["start_kind"] = expected.kind.value
            inputs["predicted_start_s"] = round(expected.start_s, 4)
            inputs["predicted_ttft_s"] = round(expected.ttft_s, 4)
        return DecisionRecord(
            decision_id=self.fleet.ids.next("d-p"),
            kind=kind,
            policy=self.fleet.policies["eviction" if kind == "evict" else "placement"],
            service="placer",
            reason=reason,
            made_at=now_s,
            model_key=command.model.key,
            instance_id=command.instance_id,
            node_id=placement.node_id,
            gpu_id=placement.gpu_id,
            chosen=chosen,
            inputs=inputs,
            rivals=rivals,
            cause_id=placement.event.event_id,
            traceparent=placement.event.traceparent,
        )
