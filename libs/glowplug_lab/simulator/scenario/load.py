"""Load scenarios, each a named fleet and workload in YAML; docs/simulator.md explains the fields.

scenario file ─▶ base files ─▶ key=value settings ─▶ checked words ─▶ Setup, arrivals, history
"""

import gzip
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, TypeVar

from pydantic import ValidationError

from glowplug.domain.access import Tenant
from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model, WeightsRef, model_key
from glowplug.domain.reading import Misread, known, laid_over
from glowplug.domain.units import DAY_S, show_bytes
from glowplug.policies.options import base_name
from glowplug.policies.prediction.port import WindowTotals
from glowplug.policies.registry import choose, installed, is_known
from glowplug_lab.simulator.costs import FITTED, StepCosts
from glowplug_lab.simulator.scenario.errors import ScenarioError, from_pydantic, join
from glowplug_lab.simulator.scenario.trace import seconds_of
from glowplug_lab.simulator.scenario.traffic import Bin, Traffic
from glowplug_lab.simulator.scenario.tree import Tree, in_units, merge, override, read_tree
from glowplug_lab.simulator.scenario.words import HistoryWords, LengthWords, ModelWords, ScenarioWords
from glowplug_lab.simulator.setup import Fault, ModelSetup, Params, PolicyNames, ServerSetup, Setup, watchful
from glowplug_lab.simulator.workload.arrival import Arrival, TraceError

__all__ = ["Scenario", "ScenarioError", "load", "load_tree"]

T = TypeVar("T")
_OURS = frozenset(ModelWords.model_fields)
_FIXED = frozenset({"key", "weights", "source", "revision"})


def build_setup(words: ScenarioWords) -> tuple[Setup, dict[str, str | LengthWords]]:
    """Also return models' own lengths, by key. Raises ScenarioError."""
    servers = _servers(words.servers)
    models: list[ModelSetup] = []
    lengths: dict[str, str | LengthWords] = {}
    for number, entry in enumerate(words.models):
        path = join("models", entry.get("name") or number)
        given = merge(merge(words.model_defaults, {"slo": words.slo} if words.slo else {}), entry)
        some, own = _models(given, servers, path)
        models += some
        lengths |= dict.fromkeys((one.model.key for one in some), own) if own is not None else {}
    keys = [one.model.key for one in models]
    if twice := next((key for key in keys if keys.count(key) > 1), "") if len(set(keys)) < len(keys) else "":
        raise ScenarioError("models", f"two of them are called {twice!r}")
    if unknown := {one.model.base for one in models} - {"", *(one.model.key for one in models if not one.model.base)}:
        raise ScenarioError("models", f"no model {min(unknown)!r} can be the base of another")
    _check_host_cache(servers, models)
    policies, faults = _policies(words.policies), _faults(words.faults, servers, set(keys))
    params = watchful() if any(fault.breaks_node for fault in faults) else Params()
    setup = Setup(
        servers=servers,
        models=tuple(models),
        policies=policies,
        params=overlay(params, words.params, "params"),
        faults=faults,
        tenants=tuple(
            Tenant(name=one.name, weight=one.weight, priority=one.priority) for one in words.workload.tenants
        ),
    )
    return setup, lengths


def _servers(entries: Sequence[Mapping[str, Any]]) -> tuple[ServerSetup, ...]:
    servers = []
    for number, entry in enumerate(entries):
        path = join("servers", entry.get("name") or number)
        name = "server" if len(entries) == 1 else f"server{number + 1}"
        servers.append(overlay(ServerSetup(name=name), entry, path))
    names = [server.name for server in servers]
    if len(set(names)) < len(names):
        raise ScenarioError("servers", f"two kinds have the same name: {', '.join(names)}")
    return tuple(servers)


def _check_host_cache(servers: Sequence[ServerSetup], models: Sequence[ModelSetup]) -> None:
    """Raises ScenarioError for a model too large for every server's host memory, through which weights are loaded."""
    if not models or any(server.weights_in_host for server in servers):
        return
    largest = max(models, key=lambda one: one.model.weights_bytes).model
    most = max(servers, key=lambda server: server.host_cache_bytes)
    if largest.weights_bytes > most.host_cache_bytes:
        host, weights = show_bytes(most.host_cache_bytes), show_bytes(largest.weights_bytes)
        problem = f"{host}, and the weights of {largest.name} take {weights}: it could never start"
        raise ScenarioError(join("servers", most.name, "host_cache_bytes"), problem)


def _policies(given: Mapping[str, Any]) -> PolicyNames:
    names = overlay(PolicyNames(), given, "policies")
    for field in fields(names):
        name = getattr(names, field.name)
        if not is_known(field.name, name):
            policies = known(name, installed(field.name))
            raise ScenarioError(f"policies.{field.name}", f"there is no {field.name} policy {name!r} {policies}")
        if base_name(name) != name:
            try:
                choose(field.name, name)
            except BadRequest as error:
                raise ScenarioError(f"policies.{field.name}", error.message) from error
    return names


def _faults(
    given: Sequence[Mapping[str, Any]], servers: Sequence[ServerSetup], keys: Collection[str]
) -> tuple[Fault, ...]:
    nodes = [f"{server.name}-{number + 1}" for server in servers for number in range(server.num_servers)]
    faults = []
    for number, entry in enumerate(given):
        path = join("faults", number)
        if missing := {"at_s", "node_id"} - entry.keys():
            raise ScenarioError(join(path, min(missing)), "is missing")
        fault = overlay(Fault(at_s=0.0, node_id=""), entry, path)
        if fault.node_id not in nodes:
            raise ScenarioError(join(path, "node_id"), f"no node {fault.node_id!r} {known(fault.node_id, nodes[:20])}")
        if fault.model and fault.model not in keys:
            raise ScenarioError(join(path, "model"), f"no model {fault.model!r}")
        faults.append(fault)
    return tuple(faults)


def _models(
    given: dict[str, Any], servers: Sequence[ServerSetup], path: str
) -> tuple[list[ModelSetup], str | LengthWords | None]:
    """(models, one per copy; own lengths). Raises ScenarioError."""
    try:
        words = ModelWords.model_validate(given)
    except ValidationError as error:
        raise from_pydantic(error, path) from error
    rest = {name: value for name, value in given.items() if name not in _OURS}
    for name in _FIXED & rest.keys():
        raise ScenarioError(join(path, name), "is made from the name")
    setup_fields = {field.name for field in fields(ModelSetup)} - {"model", "costs", "kv_bytes_per_token"}
    own = {name: rest.pop(name) for name in setup_fields & rest.keys()}
    size = words.weights_bytes
    blank = Model(
        name=words.name, key="", engine="emulated", weights=WeightsRef(uri=""), weights_bytes=size, kv_bytes=0
    )
    model = overlay(blank, {"max_instances": sum(s.num_servers * s.num_gpus for s in servers)} | rest, path)
    bases = (words.base,) if isinstance(words.base, str) else words.base or ("",)
    kv_bytes = 0 if words.base else _kv_bytes(words, model.num_gpus, servers, path)
    costs = {server.gpu_kind: _costs(words.costs, server.gpu_kind, join(path, "costs")) for server in servers}
    setups = []
    for number in range(1, words.copies + 1):
        name = words.name if words.copies == 1 else f"{words.name}-{number}"
        one = overlay(model, {"name": name, "key": _key(name, path), "kv_bytes": kv_bytes}, path)
        one = replace(one, base=bases[(number - 1) % len(bases)])
        weights = WeightsRef(uri=f"sim://{one.key}", num_bytes=size)
        one = overlay(one, {"weights": weights}, path)
        blank_setup = ModelSetup(model=one, costs=costs, kv_bytes_per_token=words.kv_bytes_per_token)
        setups.append(overlay(blank_setup, own, path))
    return setups, words.lengths


def _key(name: str, path: str) -> str:
    try:
        return model_key(name)
    except ValueError as error:
        raise ScenarioError(join(path, "name"), str(error)) from error


def _kv_bytes(words: ModelWords, num_gpus: int, servers: Sequence[ServerSetup], path: str) -> int:
    wide = [server.gpu_bytes for server in servers if server.num_gpus >= num_gpus]
    if not wide:
        most = max(server.num_gpus for server in servers)
        raise ScenarioError(
            join(path, "num_gpus"), f"{num_gpus} GPUs of one server, and no server has more than {most}"
        )
    least = words.weights_bytes + (words.kv_bytes if words.kv_bytes != "rest" else words.kv_bytes_per_token)
    fitting = [gpu for gpu in wide if -(-least // num_gpus) <= gpu]
    if not fitting:
        per_gpu = (
            f"{show_bytes(-(-least // num_gpus))} on each of {num_gpus} GPUs" if num_gpus > 1 else show_bytes(least)
        )
        raise ScenarioError(path, f"weights and KV take {per_gpu}, and no GPU has more than {show_bytes(max(wide))}")
    return words.kv_bytes if words.kv_bytes != "rest" else min(fitting) * num_gpus - words.weights_bytes


def _costs(given: Any, gpu_kind: str, path: str) -> StepCosts:
    """Read `costs`: `llama-2-7b` (as measured on this kind of GPU), `llama-2-7b/a10` (on another), `{profile, scale}`,
    `{prefill_ms: [base, per token, per token squared], decode_ms: [base, per sequence, per context token]}`, or one of
    these by kind of GPU. Raises ScenarioError."""
    if isinstance(given, Mapping) and not given.keys() & {"profile", "prefill_ms", "decode_ms"}:
        if gpu_kind not in given:
            raise ScenarioError(path, f"nothing for GPUs of kind {gpu_kind!r} {known(gpu_kind, map(str, given))}")
        return _costs(given[gpu_kind], gpu_kind, join(path, gpu_kind))
    if isinstance(given, str):
        return _profile(given, gpu_kind, path)
    if not isinstance(given, Mapping):
        raise ScenarioError(path, f"{given!r} is neither a profile nor a mapping")
    if extra := given.keys() - {"profile", "scale", "prefill_ms", "decode_ms"}:
        raise ScenarioError(join(path, min(extra)), "is not a field of costs")
    scale = given.get("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or scale <= 0:
        raise ScenarioError(join(path, "scale"), f"{scale!r} is not a number above 0")
    if "profile" in given:
        return _profile(str(given["profile"]), gpu_kind, path).scaled(float(scale))
    terms = (_terms(given, name, path) for name in ("prefill_ms", "decode_ms"))
    return StepCosts.of_ms(*terms).scaled(float(scale))


def _terms(given: Mapping[str, Any], name: str, path: str) -> tuple[float, float, float]:
    terms = given.get(name)
    numbers = terms if isinstance(terms, list) else []
    sound = all(isinstance(term, int | float) and not isinstance(term, bool) and term >= 0 for term in numbers)
    if not 1 <= len(numbers) <= 3 or not sound or not sum(numbers) > 0:
        raise ScenarioError(join(path, name), f"{terms!r} is not one to three numbers from 0 up")
    filled = [*map(float, numbers), 0.0, 0.0]
    return filled[0], filled[1], filled[2]


def _profile(name: str, gpu_kind: str, path: str) -> StepCosts:
    profile, slash, kind = name.partition("/")
    found = FITTED.get((profile, kind if slash else gpu_kind))
    if found is None:
        names = known(name, (f"{model}/{gpu}" for model, gpu in FITTED))
        raise ScenarioError(path, f"{profile!r} was not measured on {kind or gpu_kind!r} {names}")
    return found


def overlay(default: T, given: Mapping[str, Any], path: str) -> T:
    """Raises ScenarioError naming the field."""
    try:
        return laid_over(default, given)
    except Misread as error:
        raise ScenarioError(join(path, *error.path), error.problem) from error


BATCH = 8  # assumed in estimates of time in flight
EULER = 0.5772  # mean of the Gumbel distribution


@dataclass(frozen=True, slots=True)
class Scenario:
    """`notes` names replacements, to be shown with every figure."""

    words: ScenarioWords
    setup: Setup
    traffic: Traffic
    tree: Mapping[str, Any]  # as written, with settings
    beside: Path

    @property
    def name(self) -> str:
        return self.words.name

    @property
    def seconds(self) -> float:
        return self.words.seconds

    @property
    def seed(self) -> int:
        return self.words.seed

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.traffic.notes))

    def arrivals(self, seed: int | None = None) -> Iterator[Arrival]:
        return self.traffic.arrivals(self.seed if seed is None else seed)


def load(path: Path, settings: Iterable[str] = ()) -> Scenario:
    """Apply 'dotted.path=value' settings. Raises ScenarioError naming the field, or a trace's file and line."""
    tree = override(read_tree(path.resolve()), settings, path.resolve().parent)
    tree.setdefault("name", path.stem)
    return load_tree(tree, path.resolve().parent)


def load_tree(tree: Tree, beside: Path) -> Scenario:
    """Raises ScenarioError."""
    try:
        seconds = seconds_of(in_units(tree), beside)
    except (TraceError, OSError) as error:
        raise ScenarioError("workload.source", str(error)) from error
    tree = tree if seconds is None else {**tree, "seconds": seconds}
    try:
        words = ScenarioWords.model_validate(in_units(tree))
    except ValidationError as error:
        raise from_pydantic(error, "") from error
    setup, lengths = build_setup(words)
    keys = [one.model.key for one in setup.models]
    try:
        traffic = Traffic(words.workload, keys, words.seconds, beside, lengths)
        if next(traffic.arrivals(words.seed), None) is None:  # an invalid first row raises
            traffic.require_requests()
    except TraceError as error:
        raise ScenarioError("workload.source", str(error)) from error
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise ScenarioError("workload.source", f"{words.workload.source}: {error}") from error
    return Scenario(words, _with_past(words, setup, traffic), traffic, tree, beside)


def _with_past(words: ScenarioWords, setup: Setup, traffic: Traffic) -> Setup:
    began_at = setup.began_at + words.workload.start_s % DAY_S
    if not words.history.seconds:
        return replace(setup, began_at=began_at)
    window_s = words.history.window_s or _window_s(setup)
    found = {one.model.key: windows_before(words.history, traffic, one, window_s, began_at) for one in setup.models}
    history = {key: windows for key, windows in found.items() if windows}
    if not history:
        traffic.notes.append(f"history: {words.workload.source} gives no past here: the predictor begins without one")
    return replace(setup, began_at=began_at, history=history)


def _window_s(setup: Setup) -> float:
    own: float = getattr(choose("prediction", base_name(setup.policies.prediction)), "WINDOW_S", 60.0)
    return setup.params.predictor.window_s or own


def windows_before(
    words: HistoryWords, traffic: Traffic, one: ModelSetup, window_s: float, began_s: float
) -> tuple[WindowTotals, ...]:
    """Windows before `began_s` (epoch seconds), oldest first, without gaps, at multiples of `window_s`. Empty without a
    past."""
    key = one.model.key
    bins = traffic.past(key, words.seconds)
    if not bins:
        return ()
    pairs = traffic.lengths_of(key).pairs[:2000]
    prompt, response = fmean(p for p, _ in pairs), fmean(r for _, r in pairs)
    request_s = words.request_s or request_seconds(one, prompt, response)
    spread = max(1.0, traffic.words.cv)
    last = int(began_s // window_s)
    first = math.ceil((began_s + bins[0][0]) / window_s)
    grouped: dict[int, list[Bin]] = {}
    for bin_ in bins:
        for number, part in _cut(bin_, began_s, window_s):
            grouped.setdefault(number, []).append(part)

    def window(number: int) -> WindowTotals:
        parts = grouped.get(number, [])
        num = math.fsum(one[2] for one in parts)
        level = max((one[2] / one[1] * request_s for one in parts), default=0.0)
        peak = highest(level, spread, max(2.0, window_s / request_s)) if level else 0.0
        return WindowTotals(
            started_at=number * window_s,
            window_s=window_s,
            num_requests=num,
            prompt_tokens=num * prompt,
            response_tokens=num * response,
            concurrency_mean=num * request_s / window_s,
            concurrency_peak=max(peak, 1.0 if num >= 0.5 else 0.0),
        )

    return tuple(map(window, range(first, last)))


def request_seconds(one: ModelSetup, prompt: float, response: float) -> float:
    """Time in flight on the first kind of GPU, in a batch of 8."""
    costs = next(iter(one.costs.values()))
    context = round(BATCH * (prompt + response / 2))
    return costs.prefill_s(round(prompt), round(prompt * prompt)) + response * costs.decode_s(BATCH, context)


def _cut(bin_: Bin, began_s: float, window_s: float) -> Iterator[tuple[int, Bin]]:
    from_s, width_s, num = bin_
    at_s, end_s = began_s + from_s, began_s + from_s + width_s
    while at_s < end_s:
        number = int(at_s // window_s)
        upto_s = min(end_s, (number + 1) * window_s)
        if upto_s <= at_s:  # by rounding
            return
        yield number, (at_s - began_s, upto_s - at_s, num * (upto_s - at_s) / width_s)
        at_s = upto_s


def highest(mean: float, cv: float, num: float) -> float:
    """Expected maximum of `num` independent gamma variables with this mean and variance cv^2 mean, at least `mean`: the
    quantile 1 - e^-0.577 / num (Gumbel), by Wilson and Hilferty."""
    shape = mean / (cv * cv)
    deviate = max(0.0, NormalDist().inv_cdf(1 - math.exp(-EULER) / num))
    root = 1 - 1 / (9 * shape) + deviate / (3 * math.sqrt(shape))
    return max(mean, mean * root**3)
