"""Deployment of LoRA adapters onto their bases."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from glowplug.domain.errors import InvalidModelFile
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model, model_key


def on_base(model: Model, models: Mapping[str, Model], nodes: Iterable[Node]) -> Model:
    """Return an adapter as its base's engines serve it; other models unchanged. Raises InvalidModelFile."""
    if not model.base:
        return model
    base = models.get(model.base) or next((m for m in models.values() if model.base in map(model_key, m.aliases)), None)
    if base is None:
        raise _refused("base", f"no model {model.base!r} is deployed")
    if base.base or base.key == model.key:
        raise _refused("base", f"{base.name} is an adapter itself" if base.base else "a model cannot be its own base")
    if model.engine not in ("", base.engine):
        raise _refused("adapter", f"it is one for {model.engine}, and {base.name} runs on {base.engine}")
    having = [node for node in nodes if base.engine in node.engines]
    if having and not any(node.can(base.engine, "adapters") for node in having):
        raise _refused("base", f"{base.engine} loads no adapters on the nodes of this fleet")
    return replace(
        model,
        base=base.key,
        engine=base.engine,
        engine_args=base.engine_args,
        context_tokens=base.context_tokens,
        max_concurrency=base.max_concurrency,
        system_prompt=base.system_prompt,
    )


def _refused(field: str, why: str) -> InvalidModelFile:
    return InvalidModelFile(f"{field}: {why}", param=field)
