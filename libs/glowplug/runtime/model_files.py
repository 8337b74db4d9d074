"""Turn model files (YAML, checked against a published schema) into domain Models.

Unknown keys are refused. Sizes may be "300MiB", durations "30s" or "5m".
"""

import contextlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from glowplug.domain.bounds import OutOfBounds
from glowplug.domain.errors import BadRequest, EngineMisconfigured, GlowplugError, InvalidModelFile, WeightsUnavailable
from glowplug.domain.gguf import NeedMore
from glowplug.domain.model import Model, OnCold, Slo, WeightsRef, model_key
from glowplug.domain.units import parse_bytes, parse_seconds
from glowplug.engines import lora, vllm_sample
from glowplug.engines.declaration import WeightsForm
from glowplug.engines.drivers import declaration, driver, installed
from glowplug.engines.port import Ability
from glowplug.engines.samples import eight_bits_path, sample_weights_path
from glowplug.memory.discovery import HOST
from glowplug.runtime import plain_yaml
from glowplug.weights.files import read_regular
from glowplug.weights.measure import Measure, not_asked
from glowplug.weights.source import (
    SourceInfo,
    check_reference,
    file_uri,
    hub_address,
    is_directory,
    is_read,
    local_path,
    redacted,
    scheme_of,
    suffix,
)
from glowplug.weights.split_gguf import GgufPart, NotJoinable, join, part_names, read_part

# View a local split GGUF as one file, without copying tensors.


@contextlib.contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """Yield `path`, or for the first part of a split GGUF a temporary file of the same name, with joined header and
    size and holes for tensors. Raises NotJoinable naming the bad part, and OSError."""
    names = part_names(path.name)
    if not names:
        yield path
        return
    paths = [path.parent / name for name in names]
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotJoinable(f"there is no {missing[0]}{more} beside it")
    joined = join([_part(part) for part in paths], [part.stat().st_size for part in paths])
    with tempfile.TemporaryDirectory(prefix="glowplug-") as folder:
        whole = Path(folder) / path.name
        with whole.open("wb") as file:
            file.write(joined.header)
            file.truncate(joined.num_bytes)
        yield whole


def _part(path: Path) -> GgufPart:
    if not path.stat().st_size:
        raise NotJoinable(f"{path.name} is cut short")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        try:
            return read_part(data)
        except NeedMore as error:
            raise NotJoinable(f"{path.name} is cut short") from error
        except NotJoinable as error:
            raise NotJoinable(f"{path.name}: {error}") from error


log = logging.getLogger(__name__)
DEFAULT_KV_BYTES = 64 * 1024**2
MAX_FILE_BYTES = 1024**2
OF_BASE = frozenset({"weights", "weights_bytes", "kv_bytes", "context_tokens", "max_concurrency", "num_gpus"})
OF_BASE |= {"weights_shared", "asleep", "system_prompt", "engine_args"}  # an adapter takes these from its base


def _written(parse: Callable[[str], Any], accepted: Any) -> BeforeValidator:
    return BeforeValidator(
        lambda value: parse(value) if isinstance(value, str) else value, json_schema_input_type=accepted
    )


Bytes = Annotated[int, _written(parse_bytes, int | str)]
Seconds = Annotated[float, _written(parse_seconds, float | str)]


class Strict(BaseModel):
    """A part of a model file: unknown keys and malformed numbers are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse `yes` and `true` for 1."""
        if isinstance(given, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise ValueError("true or false is no number")
        return given


class WeightsFile(Strict):
    """Where the weights are: a path, file:, http(s):, hf:org/name[@revision][:file], s3://, gs:// or sample:<name>."""

    uri: str = Field(max_length=4096, description="path, file:, http(s):, hf:, s3:, gs: or sample:")
    sha256: str = Field("", pattern=r"^([0-9a-fA-F]{64})?$", description="checked where it is given")
    num_bytes: Bytes = Field(0, ge=0, description="0: as the source says")


class SloFile(Strict):
    """Objectives of requests; 0: none."""

    ttft_s: Seconds = Field(0.0, ge=0, description="time to the first token")
    tpot_s: Seconds = Field(0.0, ge=0, description="time between tokens")


def _invalid(field: str, why: object) -> InvalidModelFile:
    return InvalidModelFile(f"{field}: {why}", param=field)


def _engines(schema: dict[str, Any]) -> None:
    schema["pattern"] = f"^({'|'.join(installed())})?$"


class ModelFile(Strict):
    """One served model, as its owner writes it."""

    name: str = Field(min_length=1, max_length=200, description="the name that clients send as model")
    engine: str = Field("", json_schema_extra=_engines, description="of an adapter: that of its base")
    weights: WeightsFile | str = Field("", description="a uri, or uri with sha256 and num_bytes")
    base: str = Field("", max_length=200, description="name of the model whose engines serve this LoRA adapter")
    adapter: WeightsFile | str = Field("", description="of a LoRA adapter, in place of weights")
    weights_bytes: Bytes = Field(0, ge=0, description="GPU bytes for weights; 0: the size of the weights")
    kv_bytes: Bytes = Field(DEFAULT_KV_BYTES, ge=0, description="GPU bytes for the KV cache")
    context_tokens: int = Field(2048, ge=16, le=10_000_000, description="prompt and answer together")
    max_concurrency: int = Field(8, ge=1, le=4096, description="requests that one instance runs at once")
    max_queue: int = Field(256, ge=0, le=1_000_000, description="requests that wait at once; more get 429")
    max_wait_s: Seconds = Field(60.0, ge=0, description="longest wait of a request for an instance")
    keep_alive_s: Seconds = Field(30.0, ge=-1, description="idle time before the last instance drains; -1 never")
    min_instances: int = Field(0, ge=0, le=1000, description="instances that run at once at least")
    max_instances: int = Field(1, ge=1, le=1000, description="instances that run at once at most")
    num_gpus: int = Field(1, ge=1, le=64, description="GPUs of one node that one instance spreads over, evenly")
    weights_shared: bool = Field(
        False, description="instances are to read the weights in host memory: on one GPU they count once for all"
    )
    on_cold: OnCold = Field(OnCold.HOLD, description="while no instance runs, requests wait or are refused")
    pinned: bool = Field(False, description="never evicted, always at least one instance")
    preload: bool = Field(False, description="started when deployed")
    asleep: bool = Field(
        False, description="started once when deployed, and asleep from then on while nothing is asked of it"
    )
    priority: int = Field(0, ge=-1000, le=1000, description="a higher one is placed earlier and evicted later")
    aliases: list[str] = Field(default_factory=list, max_length=32, description="further names for clients to send")
    system_prompt: str = Field("", max_length=100_000, description="of requests that bring none")
    slo: SloFile = SloFile()
    engine_args: dict[str, Any] = Field(default_factory=dict, description="arguments for the engine, one in a line")

    @field_validator("engine")
    @classmethod
    def _is_an_engine(cls, given: str) -> str:
        try:
            return given and declaration(given).name
        except BadRequest as error:
            raise ValueError(error.message) from error

    def to_model(self, source: str, base: Path | None = None, measure: Measure = not_asked) -> Model:
        """Raises InvalidModelFile naming the field. Relative weight paths start at `base`; `measure` gets missing sizes
        of remote weights."""
        try:
            key = model_key(self.name)
        except ValueError as error:
            raise _invalid("name", error) from error
        if self.base or self.adapter:
            return self._adapter(key, source, base, measure)
        if not self.engine:
            raise _invalid("engine", "Field required")
        engine = declaration(self.engine)
        given = self.weights if isinstance(self.weights, WeightsFile) else WeightsFile(uri=self.weights)
        weights = _resolve(given, base)
        if not weights.uri and engine.weights.required:
            raise _invalid("weights", f"engine {self.engine} needs them")
        is_sized = bool(self.weights_bytes or weights.num_bytes)
        real_bytes = _size(weights.uri) or (0 if is_sized else self._measured(weights.uri, measure))
        local = weights.uri.removeprefix("file:")
        if weights.num_bytes and real_bytes and weights.num_bytes != real_bytes:
            raise _invalid("weights.num_bytes", f"{weights.num_bytes} is declared, {local} has {real_bytes}")
        weights_bytes = self.weights_bytes or weights.num_bytes or real_bytes
        if not weights_bytes and weights.uri.startswith("file:"):
            raise _invalid("weights", f"cannot read {local}")
        if not weights_bytes:
            raise _invalid("weights_bytes", "give the size, it cannot be read from here")
        if self.num_gpus > 1 and not engine.capabilities.groups:
            raise _invalid("num_gpus", f"{self.engine} instances run on one GPU so far")
        if self.weights_shared and Ability.SHARE not in driver(self.engine).abilities(HOST):
            raise _invalid("weights_shared", f"{self.engine} instances have their weights for themselves")
        if self.weights_shared and not self.kv_bytes:
            raise _invalid(
                "kv_bytes", "a further instance that shares its weights is granted its KV cache alone: give the size"
            )
        fields = self.model_dump(exclude={"weights", "weights_bytes", "slo", "aliases", "adapter"})
        try:
            model = Model(
                **fields,
                key=key,
                weights=weights,
                weights_bytes=weights_bytes,
                aliases=tuple(self.aliases),
                slo=Slo(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s),
                source=source,
            )
            return check_engine(model)
        except OutOfBounds as error:
            raise InvalidModelFile(str(error), param=error.field) from error
        except EngineMisconfigured as error:
            raise InvalidModelFile(error.message, param=error.param) from error

    def _adapter(self, key: str, source: str, base: Path | None, measure: Measure) -> Model:
        """Convert a LoRA adapter's fields; deployment adds its base's (controllers/autoscaler/adapting.py)."""
        for name, other in (("base", "adapter"), ("adapter", "base")):
            if not getattr(self, name):
                raise _invalid(name, f"{other} is given, and an adapter has both")
        if wrong := sorted(OF_BASE & self.model_fields_set):
            raise _invalid(wrong[0], "an adapter takes this from its base: leave it out")
        given = self.adapter if isinstance(self.adapter, WeightsFile) else WeightsFile(uri=self.adapter)
        try:
            weights, base_key = _resolve(given, base), model_key(self.base)
        except InvalidModelFile as error:
            raise InvalidModelFile(error.message.replace("weights:", "adapter:", 1), param="adapter") from error
        except ValueError as error:
            raise _invalid("base", error) from error
        path, facts = local_path(weights.uri), None
        try:
            if path is not None and path.exists():
                facts = lora.read(path)
        except (lora.InvalidAdapter, OSError) as error:
            raise _invalid("adapter", error) from error
        num_bytes = weights.num_bytes or _size(weights.uri) or self._measured(weights.uri, measure)
        if not num_bytes:
            raise _invalid("adapter", "give num_bytes, its size cannot be read from here")
        engine = facts.engine if facts is not None else self.engine
        if self.engine not in ("", engine):
            raise _invalid("adapter", f"it is one for {engine}, not for {self.engine}")
        dropped = {"weights", "slo", "aliases", "adapter", "engine", "base", *OF_BASE}
        try:
            return Model(
                **self.model_dump(exclude=dropped),
                key=key,
                engine=engine,
                base=base_key,
                adapter_rank=facts.rank if facts is not None else 0,
                weights=replace(weights, num_bytes=num_bytes),
                weights_bytes=num_bytes,
                kv_bytes=0,
                aliases=tuple(self.aliases),
                slo=Slo(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s),
                source=source,
            )
        except OutOfBounds as error:
            raise InvalidModelFile(str(error), param=error.field) from error

    def _measured(self, uri: str, measure: Measure) -> int:
        """Bytes of remote weights by their source; 0 if unknown."""
        if not uri or local_path(uri) is not None:
            return 0
        try:
            info: SourceInfo | None = measure(uri)
            if info is not None and not self.base:
                _check_form(self.engine, uri, info.is_directory)
        except WeightsUnavailable as error:
            if error.param == "weights":  # the address does not name one
                raise InvalidModelFile(f"weights: {error.message}", param="weights") from error
            message = f"weights_bytes: give the size, it cannot be read from here: {error.message}"
            raise InvalidModelFile(message, param="weights_bytes") from error
        except EngineMisconfigured as error:
            raise InvalidModelFile(error.message, param=error.param) from error
        return info.num_bytes if info else 0


def weights_at(uri: str, base: Path | None = None) -> WeightsRef:
    """Weights as in a model file. Raises InvalidModelFile."""
    return _resolve(WeightsFile(uri=uri, sha256="", num_bytes=0), base)


def _resolve(weights: WeightsFile, base: Path | None) -> WeightsRef:
    uri = weights.uri
    if not uri:
        return WeightsRef(uri="", num_bytes=weights.num_bytes, sha256=weights.sha256.lower())
    if uri.startswith("sample:"):
        uri = f"{_sample(uri.removeprefix('sample:'))}"
    try:
        check_reference(uri)
    except WeightsUnavailable as error:
        sample = ", sample:" if scheme_of(uri) and not is_read(scheme_of(uri)) else ""
        raise InvalidModelFile(f"weights: {error.message}{sample}", param="weights") from error
    if scheme_of(uri) == "hf":
        uri = hub_address(uri).uri  # one spelling, so that models share a copy
    path = local_path(uri)
    if path is not None:
        path = path.expanduser()
        path = path if path.is_absolute() or base is None else base / path
        uri = file_uri(path)
    return WeightsRef(uri=uri, num_bytes=weights.num_bytes, sha256=weights.sha256.lower())


def _sample(name: str) -> Path:
    """File of an installed sample model (smollm2), its eight-bit version (smollm2-q8), or its Hugging Face directory
    (smollm2-hf)."""
    if name == "smollm2-hf":
        return vllm_sample.sample_dir()
    find = {"smollm2": sample_weights_path, "smollm2-q8": eight_bits_path}.get(name)
    if find is None:
        known = "smollm2, smollm2-q8, smollm2-hf"
        raise InvalidModelFile(f"weights: no sample named {name!r} (there are {known})", param="weights")
    try:
        return find()
    except GlowplugError as error:
        raise InvalidModelFile(f"weights: {error.message}", param="weights") from error


def fewer_slots(asked: int, model: Model) -> str:
    """Note about a model with fewer slots than its file asks for, or ""."""
    if model.max_concurrency >= asked:
        return ""
    return (
        f"max_concurrency: an instance runs {model.max_concurrency} at once, not {asked}: kv_bytes holds no more of "
        f"{model.context_tokens} tokens (context_tokens); requests beyond wait"
    )


def check_engine(model: Model) -> Model:
    """Lower max_concurrency to the engine's own bound, if the weights are local. Raises EngineMisconfigured if the
    engine's driver finds that no start can succeed. Remote weights are known by address only."""
    engine = declaration(model.engine)
    engine.arguments.check(model.engine_args)
    uri, reads = model.weights.uri, f"{model.engine} reads {engine.weights.kind}"
    if not uri:
        return model
    path = local_path(uri)
    if path is None:
        if (several := is_directory(uri)) is not None:
            _check_form(model.engine, uri, several)
        if (ending := suffix(uri)) in engine.weights.other_suffixes:
            raise EngineMisconfigured(f"weights: {redacted(uri)} ends in {ending}, and {reads}", param="weights")
        return model
    try:
        if not path.exists():
            return model  # a node may see it
        with in_one_piece(path) as whole:
            if why := engine.weights.unreadable(whole):
                raise EngineMisconfigured(f"weights: {why}, and {reads}", param="weights")
            engine.weights.check(model, whole)
            return replace(model, max_concurrency=engine.weights.num_slots(model, whole))
    except NotJoinable as error:
        raise EngineMisconfigured(f"weights: {path}: {error}", param="weights") from error
    except OSError as error:
        raise EngineMisconfigured(f"weights: {path} cannot be read: {error.strerror}", param="weights") from error
    except EngineMisconfigured:
        raise
    except Exception as error:  # any unforeseen error refuses the file
        log.exception("the weights at %s cannot be read", path)
        text = f"weights: {path} cannot be read: {type(error).__name__}: {error}"
        raise EngineMisconfigured(text, param="weights") from error


def _check_form(engine: str, uri: str, several: bool) -> None:
    weights, form = declaration(engine).weights, WeightsForm.DIRECTORY if several else WeightsForm.FILE
    if weights.form not in (WeightsForm.ANY, form):
        message = f"weights: {redacted(uri)} is a {form}, and {engine} reads {weights.kind}"
        raise EngineMisconfigured(message, param="weights")


def _size(uri: str) -> int:
    """Present bytes of a local file (all parts if split) or directory; 0 if unreadable. It may change later."""
    path = local_path(uri) if uri else None
    if path is None:
        return 0
    try:
        if path.is_dir():
            files = (f for f in path.rglob("*") if not any(p.startswith(".") for p in f.relative_to(path).parts))
            return sum(f.stat().st_size for f in files if f.is_file())  # hidden ones are not fetched
        with in_one_piece(path) as whole:
            return whole.stat().st_size
    except NotJoinable as error:
        raise InvalidModelFile(f"weights: {path}: {error}", param="weights") from error
    except OSError:
        return 0


def parse(data: Any, source: str, base: Path | None = None, measure: Measure = not_asked) -> Model:
    """Make a Model of decoded YAML or JSON. Raises InvalidModelFile naming the first wrong field."""
    try:
        return ModelFile.model_validate(data).to_model(source, base, measure)
    except ValidationError as error:
        raise first_fault(error) from error


def first_fault(error: ValidationError) -> InvalidModelFile:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "file"
    return InvalidModelFile(f"{where}: {message_of(first)}", param=where)


def message_of(fault: Mapping[str, Any]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    return "there is no such key" if fault["type"] == "extra_forbidden" else message


def read_yaml(path: Path, max_bytes: int = MAX_FILE_BYTES) -> list[Any]:
    """Non-empty documents of a YAML file. Raises InvalidModelFile without the file's name, which the caller adds."""
    try:
        text = read_regular(path, max_bytes).decode("utf-8")
        return [d for d in plain_yaml.load_all(text) if d is not None]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InvalidModelFile(f"{line}{error.problem or error.context}") from error
    except OSError as error:
        raise InvalidModelFile(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidModelFile("it is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise InvalidModelFile(str(error).splitlines()[0]) from error


def load(path: Path, measure: Measure = not_asked) -> list[Model]:
    """All models of a YAML file. Raises as `read_yaml`."""
    documents = read_yaml(path)
    if not documents:
        raise InvalidModelFile("no model in it")
    for document in documents:
        if not isinstance(document, dict):
            raise InvalidModelFile(f"a model is a mapping, not {type(document).__name__}")
    models = [parse(document, str(path), path.parent, measure) for document in documents]
    keys = [m.key for m in models]
    twice = next((k for k in keys if keys.count(k) > 1), "")
    if twice:
        raise InvalidModelFile(f"the file declares model {twice!r} twice", param="name")
    return models


def json_schema() -> dict[str, Any]:
    """The published schema: deploy/models/model.schema.json."""
    made_by = "Written by `python -m glowplug.runtime.model_files > deploy/models/model.schema.json`"
    schema = {"$comment": made_by, **ModelFile.model_json_schema()}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Glowplug model file"
    return schema


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
