"""Search the fleet's decisions, alike over the placer's REST and on the console's page."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Query

from glowplug.domain.decision import DecisionRecord
from glowplug.telemetry.tracing import trace_id_of

_Text = Annotated[str, Query(max_length=256)]


@dataclass(frozen=True, kw_only=True)
class DecisionSearch:
    """Filters must match exactly, except the text `q`, which may be in any field. `instance` also finds the decisions
    that chose it, as a victim."""

    kind: _Text = ""
    policy: _Text = ""
    service: _Text = ""
    model: _Text = ""
    node: _Text = ""
    gpu: _Text = ""
    instance: _Text = ""
    request: _Text = ""
    trace: _Text = ""
    q: _Text = ""

    def wants(self, record: DecisionRecord) -> bool:
        pairs = (
            (self.kind, record.kind),
            (self.policy, record.policy),
            (self.service, record.service),
            (self.model, record.model_key),
            (self.node, record.node_id),
            (self.gpu, record.gpu_id),
            (self.request, record.request_id),
        )
        return (
            all(not given or given == value for given, value in pairs)
            and (not self.instance or self.instance in (record.instance_id, *record.chosen.split(", ")))
            and (not self.trace or self.trace.lower() == trace_id_of(record.traceparent))
            and (not self.q or self.q.strip().lower() in _text(record))
        )


def _text(record: DecisionRecord) -> str:
    texts = (record.decision_id, record.reason, record.model_key, record.instance_id, record.node_id, record.gpu_id,
             record.request_id, record.chosen, record.policy, record.kind)  # fmt: skip
    return " ".join(texts).lower()
