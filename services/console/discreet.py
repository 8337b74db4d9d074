"""What everybody who opens the page may see of a model: no text of a person, and no secret of an address."""

from dataclasses import replace

from glowplug.domain.model import Model, WeightsRef
from glowplug.events import Event
from glowplug.weights.source import redacted


def discreet_weights(weights: WeightsRef) -> WeightsRef:
    """Its address without what may be a secret in it: user, password, query. One that is none is left out."""
    try:
        return replace(weights, uri=redacted(weights.uri))
    except ValueError:
        return replace(weights, uri="")


def discreet_model(model: Model) -> Model:
    """Of its system prompt only the length is told."""
    said = f"{len(model.system_prompt)} characters" if model.system_prompt else ""
    return replace(model, system_prompt=said, weights=discreet_weights(model.weights))


def discreet_event(event: Event) -> Event:
    """The event with the model or the weights it carries made discreet; itself when it carries none."""
    data = event.data
    if isinstance(model := getattr(data, "model", None), Model):
        return replace(event, data=replace(data, model=discreet_model(model)))
    if isinstance(weights := getattr(data, "weights", None), WeightsRef):
        return replace(event, data=replace(data, weights=discreet_weights(weights)))
    return event
