"""REST API of model files: check a draft without deploying it.

The console's form shows these answers, so that it never disagrees with a deployment."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Depends
from pydantic import Field

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.keeping import check_able
from glowplug.controllers.autoscaler.models import check_names, declared
from glowplug.controllers.autoscaler.replacing import ends_at_once, has_room, outdated_of
from glowplug.domain.errors import GlowplugError, InvalidModelFile
from glowplug.domain.hardware import Node
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model, Rung
from glowplug.domain.phrasing import counted
from glowplug.domain.units import show_bytes
from glowplug.engines.drivers import declaration, installed
from glowplug.fleet.start_times import START_TIMES, StartKind, StartRow
from glowplug.fleet.status import StartEstimates
from glowplug.fleet.tables import find_model
from glowplug.runtime import model_forms
from glowplug.runtime.control import ControlService
from glowplug.runtime.model_files import MAX_FILE_BYTES, ModelFile, Strict, fewer_slots, json_schema
from glowplug.runtime.model_forms import Fault
from glowplug.services.autoscaler.model_watch import ModelWatch
from glowplug.state.port import NotATable, StoreUnavailable
from glowplug.state.rows import read_rows
from glowplug.weights.files import NoAnswer

# Deployable first contents of a form, by engine, given its engine and sample.
EXAMPLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llamacpp": {"weights": "sample:smollm2", "kv_bytes": "100MiB", "context_tokens": 2048, "max_concurrency": 2},
    "vllm": {"weights": "sample:smollm2-hf", "weights_bytes": "270MB", "kv_bytes": "256MiB", "context_tokens": 1024},
    "emulated": {"weights_bytes": "15.2GB", "kv_bytes": "16GiB", "engine_args": {"profile": "qwen2.5-7b/a100"}},
}


class DraftBody(Strict):
    """A model file that is being written: as `yaml`, or else as `fields`, of which `texts` gives some as YAML. `edits`:
    the key of the model that it changes; empty where it makes a new one."""

    fields: dict[str, Any] = Field(default_factory=dict, max_length=200)
    yaml: str | None = Field(None, max_length=MAX_FILE_BYTES)
    texts: dict[str, str] = Field(default_factory=dict, max_length=50)
    edits: str = Field("", max_length=256)


async def modelled(watch: ModelWatch, body: ModelFile, source: str = "api") -> Model:
    """Make a model from a request's body. Raises InvalidModelFile if the source of the weights does not answer for
    their size."""
    try:
        return await watch.reader.run(
            f"weights of {body.name}", lambda: body.to_model(source, Path.cwd(), watch.measure)
        )
    except NoAnswer as error:
        raise InvalidModelFile(f"weights: cannot be read: {error.strerror}", param="weights") from error


def routes(service: ControlService, watch: ModelWatch, allowed: Any) -> APIRouter:
    router = APIRouter(prefix="/v1/model_files", tags=["model files"], dependencies=[Depends(allowed)])

    @router.get("")
    async def form() -> dict[str, Any]:
        """The parts of a form: the schema of model files, and of each engine its weights, its arguments and an
        example."""
        return {"schema": json_schema(), "engines": {name: engine_row(name) for name in installed()}}

    @router.post("")
    async def check(body: DraftBody) -> dict[str, Any]:
        """Check a model file and deploy nothing: `errors` by field, the YAML and its fields, the
        `model` that a deployment would make, null while there are errors, and the `change` in words: instances
        `replaced`, each after a start of `start_s`, or before it (`in_place`), and `ended`, which do not serve."""
        controller = service.controller(AutoscalerController)
        given, faults = read_draft(body)
        file, wrong = (None, []) if faults else model_forms.check_fields(given)
        faults += wrong
        row, warning, replaced = None, "", Replaced()
        if file is not None:
            try:
                model = await modelled(watch, file)
                check_fleet(model, controller, body.edits)
                row, warning = model_row(model), warning_of(file, model, controller.nodes.values())
                replaced = replaced_by(model, controller, await start_estimates(service))
            except GlowplugError as error:
                faults.append(model_forms.fault_of(error))
        shown, text = shown_of(body, given)
        errors = [asdict(fault) for fault in faults]
        answer = {"fields": shown, "yaml": text, "errors": errors, "model": row, "warning": warning}
        return answer | asdict(replaced) | {"change": replaced.words}

    @router.get("/{name:path}")
    async def file_of(name: str) -> dict[str, Any]:
        """The model file that declares a deployed model, by key, name or alias. `source`: the path of the file that it
        comes from, "api" where it came over REST."""
        model = find_model(service.controller(AutoscalerController).models, name)
        given = model_forms.fields_of(model)
        return {"key": model.key, "source": model.source, "fields": given, "yaml": model_forms.written(given)}

    return router


def engine_row(name: str) -> dict[str, Any]:
    engine = declaration(name)
    arguments = [
        {"name": one, "meaning": argument.meaning, "allowed": argument.allowed}
        for one, argument in sorted(engine.arguments.known.items())
    ]
    weights = {"weights": engine.weights.kind, "is_required": engine.weights.required}
    return weights | {"arguments": arguments, "example": dict(EXAMPLES.get(name, {}))}


def read_draft(body: DraftBody) -> tuple[dict[str, Any], list[Fault]]:
    try:
        given = dict(body.fields) if body.yaml is None else model_forms.read(body.yaml)
    except InvalidModelFile as error:
        return {}, [Fault("yaml", error.message)]
    faults = []
    for field, text in body.texts.items():
        try:
            value = model_forms.read(text, "write one argument per line, as name: value") if text.strip() else {}
        except InvalidModelFile as error:
            faults.append(Fault(field, error.message))
            continue
        given.pop(field, None)
        if value:
            given[field] = value
    return given, faults


def shown_of(body: DraftBody, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the fields in JSON (dates as text), and the YAML: the user's own, or that of the fields."""
    try:
        shown = json.loads(json.dumps(given, default=str, allow_nan=False))
        json.dumps(shown, ensure_ascii=False).encode()
        return shown, model_forms.written(given) if body.yaml is None else body.yaml
    except (TypeError, ValueError, RecursionError):
        return {}, body.yaml or ""


def check_fleet(model: Model, controller: AutoscalerController, edits: str) -> None:
    """Raises the errors of a deployment, and InvalidModelFile if an edit takes another model's name."""
    if edits and model.key != edits:
        message = f"name: a model named {model.name!r} is another model: deploy it as a new one"
        raise InvalidModelFile(message, param="name")
    check_names(model, controller.models.values(), create=not edits)
    if model.asleep:
        check_able(model, Rung.ASLEEP, controller.nodes, "asleep")


def model_row(model: Model) -> dict[str, Any]:
    return {
        "key": model.key,
        "memory_bytes": model.memory_bytes,
        "weights_bytes": model.weights_bytes,
        "kv_bytes": model.kv_bytes,
        "max_concurrency": model.max_concurrency,
        "num_gpus": model.num_gpus,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """Instances that a deployment would replace or end. `start_s`: predicted, of each new one. `in_place`: no memory is
    free beside them, so that each leaves before its start, from weights that have come ahead."""

    replaced: tuple[str, ...] = ()
    in_place: bool = False
    ended: tuple[str, ...] = ()
    start_s: float = 0.0
    of_running: bool = False

    @property
    def words(self) -> str:
        if not self.of_running:
            return ""
        if not (self.replaced or self.ended):
            return "No instance is replaced"
        parts = []
        if num := len(self.replaced):
            verb, each = ("is", "") if num == 1 else ("are", "one after the other, each ")
            how = f"{each}after a start of about {self.start_s:.1f} s"
            if self.in_place:
                how = f"{each}in place, since no memory is free: gone for about {self.start_s:.1f} s"
            parts.append(f"{counted(num, 'instance')} {verb} replaced, {how}")
        if num := len(self.ended):
            does, ends = ("does", "ends") if num == 1 else ("do", "end")
            parts.append(f"{counted(num, 'instance')} that {does} not serve {ends} at once")
        return "; ".join(parts)


def replaced_by(model: Model, controller: AutoscalerController, estimates: StartEstimates) -> Replaced:
    known = controller.models.get(model.key)
    if known is None:
        return Replaced()
    after, rows = declared(model, known, known.revision + 1), controller.instances.living(model.key)
    outdated = outdated_of(after, rows)
    ended = tuple(sorted(i for i, row in outdated.items() if ends_at_once(row, rows)))
    replaced = tuple(sorted(i for i, row in outdated.items() if row.state is InstanceState.READY))
    in_place = bool(replaced) and bool(controller.nodes) and not has_room(model, controller.nodes.values())
    start_s = 0.0
    if in_place and estimates.times.knows(model):
        start_s = estimates.times.predict(model, StartKind.CACHED).whole_s
    elif replaced:
        start_s = estimates.whole_s(model, ())
    return Replaced(replaced=replaced, ended=ended, in_place=in_place, start_s=round(start_s, 3), of_running=bool(rows))


async def start_estimates(service: ControlService) -> StartEstimates:
    """Return the estimates of the placer's learned times; its defaults where the store does not answer."""
    estimates = StartEstimates()
    with suppress(StoreUnavailable, NotATable):
        rows, _ = read_rows(START_TIMES, await service.world.store.load(START_TIMES), StartRow)
        estimates.times.restore(rows)
    return estimates


def warning_of(file: ModelFile, model: Model, nodes: Iterable[Node]) -> str:
    said = [fewer_slots(file.max_concurrency, model)]
    known = list(nodes)
    having = [node for node in known if model.engine in node.engines]
    if known and not having:
        said.append(f"no node of this fleet can start {model.engine} engines, so no instance can start")
    largest = max((gpu.total_bytes for node in having for gpu in node.gpus), default=0)
    needed = -(-model.memory_bytes // model.num_gpus)
    if having and needed > largest:
        has = f"the largest GPU of a node with {model.engine} has {show_bytes(largest)}"
        said.append(f"an instance needs {show_bytes(needed)} of one GPU and {has}")
    return "; ".join(filter(None, said))
