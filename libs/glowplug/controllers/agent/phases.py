"""The phases of a start as its agent tells them: in order, beside what its command expected of each."""

from collections.abc import Iterable
from dataclasses import replace

from glowplug.controllers.agent.messages import Holding
from glowplug.domain.instance import InstanceState, Phase, PhaseName
from glowplug.policies.start_times import fresh_kind, kind_from

INTERRUPTED = "interrupted"  # no kind to learn from

_ORDER = {name: rank for rank, name in enumerate(PhaseName)}


def predicted(holding: Holding, phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """`phases` in order, each with what its start's command expected of it, where it carries nothing yet."""
    expected = holding.predicted
    return tuple(
        p if p.predicted_s else replace(p, predicted_s=expected.get(p.name.value, 0.0))
        for p in sorted(phases, key=lambda p: (_ORDER[p.name], p.started_at))
    )


def start_kind(holding: Holding) -> str:
    """What the start of an instance found."""
    if holding.has_restarted:
        return INTERRUPTED
    if holding.warmth:
        return kind_from(InstanceState(holding.warmth)).value
    return fresh_kind(is_cached=holding.is_cached).value
