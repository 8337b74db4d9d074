"""A placement policy is asked, and what it read of its request is noted: whoever reads alike is answered alike.

Hundreds of placements may be refused in one pass. One refusal stands for another placement where everything the policy
read of the first request has the same value in the second: its fields, and the view's answers to questions about its
model. A policy that reads a field it did not read before is so asked about every value of it; nobody lists its fields.
"""

from collections.abc import Callable, Iterator
from typing import Any

from glowplug.domain.model import Model, Slo, WeightsRef
from glowplug.policies.decisions import PlaceDecision
from glowplug.policies.placement.node_index import IndexedNodes
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.start_times import StartTimes

Place = Callable[..., PlaceDecision]
_Path = tuple[str, ...]
_Reading = tuple[_Path, Any, Any]  # of what, the arguments of a question (None of a field), the value
_NESTED = (Model, WeightsRef, Slo, IndexedNodes, StartTimes)


class Refusals:
    """What a policy refused in one pass, in which the fleet is taken as it was at the first refusal."""

    def __init__(self) -> None:
        self._known: list[tuple[list[_Reading], PlaceDecision]] = []

    def ask(self, place: Place, request: PlaceRequest, view: PlacementView) -> PlaceDecision:
        """What the policy says; a refusal is kept for those that are alike."""
        noted: dict[tuple[_Path, str], _Reading] = {}
        decision = place(_Noted(request, ("request",), noted), _Noted(view, ("view",), noted))
        if not decision.stages:
            self._known.append((list(noted.values()), decision))
        return decision

    def alike(self, request: PlaceRequest, view: PlacementView) -> PlaceDecision | None:
        """A refusal that holds for this request too; one for being late holds for whoever has waited longer."""
        for readings, decision in self._known:
            if all(_reads_alike(reading, request, view, decision) for reading in readings):
                return decision
        return None


def _reads_alike(reading: _Reading, request: PlaceRequest, view: PlacementView, decision: PlaceDecision) -> bool:
    path, arguments, value = reading
    now: Any = request if path[0] == "request" else view
    for name in path[1:]:
        now = getattr(now, name)
    if arguments is not None:
        given, named = arguments
        now = _settled(now(*(request.model if one is _MODEL else one for one in given), **named))
    if decision.is_late and path == ("request", "waited_s"):
        return bool(now >= value)
    return bool(now == value)


class _Noted:
    """A request or a view whose reader is noted. What is asked of the view about no model is the same for all."""

    def __init__(self, real: Any, path: _Path, noted: dict[tuple[_Path, str], _Reading]) -> None:
        self._real, self._path, self._noted = real, path, noted

    def __getattr__(self, name: str) -> Any:
        value, path = getattr(self._real, name), (*self._path, name)
        if isinstance(value, _NESTED):
            return _Noted(value, path, self._noted)
        if path[0] == "request":
            self._noted.setdefault((path, ""), (path, None, value))
            return value
        return self._question(value, path) if callable(value) else value

    def _question(self, method: Callable[..., Any], path: _Path) -> Callable[..., Any]:
        def asked(*given: Any, **named: Any) -> Any:
            real = [one._real if isinstance(one, _Noted) else one for one in given]
            answer = _settled(method(*real, **named))
            if any(isinstance(one, _Noted) for one in given):
                arguments = (tuple(_MODEL if isinstance(one, _Noted) else one for one in given), named)
                self._noted.setdefault((path, repr(arguments)), (path, arguments, answer))
            return answer

        return asked

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real)


def _settled(answer: Any) -> Any:
    """An answer that may be read twice, and stays as it is."""
    return tuple(answer) if isinstance(answer, Iterator) else answer


class _OwnModel:
    def __repr__(self) -> str:
        return "its model"


_MODEL = _OwnModel()
