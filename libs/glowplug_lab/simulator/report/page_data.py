"""Data and HTML of the report: variants over seeds, a plan's curve, one run in full.

Excess rows are dropped by rule and counted: above `MAX_REQUESTS`, cold, failed and slow requests are kept first, then
each n-th; above `MAX_DECISIONS`, decisions about shown requests and instances; above `MAX_SPANS`, the longest spans.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from glowplug import __version__
from glowplug.events.subjects import entity_facts
from glowplug_lab.simulator.jobs import Outcome
from glowplug_lab.simulator.results import Quantiles
from glowplug_lab.simulator.run_files import read_json, read_lines
from glowplug_lab.simulator.scenario.load import Scenario
from glowplug_lab.simulator.setup import Setup

SCRIPTS = ("words.js", "curves.js", "timeline.js", "requests.js", "main.js")
Detail = dict[str, Any]


def page_data(
    scenario: Scenario,
    outcomes: Sequence[Outcome],
    detail: Detail | None = None,
    plan: Detail | None = None,
    notes: Iterable[str] = (),
) -> Detail:
    """`detail`: one run (`detail_of_run`); `plan`: a sweep over fleets."""
    setup = scenario.setup
    ttft_s = {one.model.slo.ttft_s for one in setup.models}
    return {
        "name": scenario.name,
        "title": scenario.words.title,
        "version": __version__,
        "simulated": True,
        "seconds": scenario.seconds,
        "gpus": sum(server.num_servers * server.num_gpus for server in setup.servers),
        "num_models": len(setup.models),
        "models": sorted(one.model.key for one in setup.models),
        "policies": asdict(setup.policies),
        "slo_ttft_s": ttft_s.pop() if len(ttft_s) == 1 else 0.0,
        "seeds": list(dict.fromkeys(outcome.seed for outcome in outcomes)),
        "notes": list(dict.fromkeys([*scenario.notes, *notes, *(note for o in outcomes for note in o.notes)])),
        "variants": variants_over_seeds(outcomes),
        "detail": detail,
        "plan": plan,
        "setup": yaml.safe_dump(dict(scenario.tree), sort_keys=False, allow_unicode=True, width=110),
    }


def variants_over_seeds(outcomes: Sequence[Outcome]) -> list[Detail]:
    """Figures over seeds; models and curves from the first seed."""
    by_variant: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_variant.setdefault(outcome.variant, []).append(outcome)
    return [
        {
            "label": label,
            "total": spread([one.numbers["total"] for one in some]),
            "fleet": spread([one.numbers["fleet"] for one in some]),
            "models": some[0].numbers["models"],
            "curves": some[0].numbers["curves"],
        }
        for label, some in by_variant.items()
    ]


def spread(rows: Sequence[Mapping[str, Any]]) -> Detail:
    out: Detail = {}
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(rows) == 1 or not all(isinstance(value, int | float | None) for value in values):
            out[name] = values[0]
        elif not numbers:
            out[name] = None
        else:
            out[name] = {"mean": sum(numbers) / len(numbers), "min": min(numbers), "max": max(numbers)}
    return out


def html(data: Detail) -> str:
    """Deterministic."""
    folder = resources.files("glowplug_lab.simulator.report").joinpath("page")

    def text(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    title = f"{data['title'] or data['name']} · simulated · Glowplug"
    page = text("page.html").replace("@@TITLE@@", title.replace("&", "&amp;").replace("<", "&lt;"))
    page = page.replace("@@CSS@@", text("page.css")).replace("@@JS@@", "\n".join(text(name) for name in SCRIPTS))
    return page.replace("@@DATA@@", embedded.replace("<!--", "<\\u0021--"))


INSTANCES = '{"subject":"' + entity_facts("instance").partition("*")[0]
MAX_REQUESTS: Final = 12_000
MAX_DECISIONS: Final = 6_000
MAX_RIVALS: Final = 12
MAX_SPANS: Final = 40_000
MAX_STEPS: Final = 5_000
OWNERS: Final = ("weights", "kv", "prewarm", "reservation", "sleeper")
ReadRows = Callable[[], Iterable[Mapping[str, Any]]]  # from the beginning


class Spans:
    """Call `gpu` in order of time."""

    def __init__(self, setup: Setup) -> None:
        self.gpus = [
            {"id": f"{server.name}-{number}/{n}", "node": f"{server.name}-{number}", "bytes": server.gpu_bytes}
            for server in setup.servers
            for number in range(1, server.num_servers + 1)
            for n in range(server.num_gpus)
        ]
        self._numbers = {gpu["id"]: number for number, gpu in enumerate(self.gpus)}
        self._open: dict[int, tuple[float, tuple[tuple[str, str, int], ...]]] = {}
        self._holders: dict[str, int] = {}
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("gpu", "from", "to", "owner", "holder", "base", "bytes")
        }
        self._held: list[tuple[float, int]] = []
        self._latest: dict[tuple[int, str, str], int] = {}

    def gpu(self, gpu_id: str, at_s: float, grants: Iterable[tuple[str, str, int]]) -> None:
        """`grants`: (holder, owner, bytes), from `at_s` (seconds of the run) on."""
        number = self._numbers[gpu_id]
        held = tuple(sorted(grants, key=lambda grant: (grant[0], OWNERS.index(grant[1]))))
        since_s, before = self._open.get(number, (0.0, ()))
        if held == before:
            return
        self._close(number, since_s, at_s, before)
        self._open[number] = (max(0.0, at_s), held)
        change = bool(held) - bool(before)
        if change:
            self._held.append((max(0.0, at_s), change))

    def finish(self, end_s: float) -> None:
        for number, (since_s, held) in sorted(self._open.items()):
            self._close(number, since_s, end_s, held)
        self._open.clear()

    def use(self) -> list[tuple[float, int]]:
        """Steps (time, GPUs in use)."""
        steps: dict[float, int] = {0.0: 0}
        now = 0
        for at_s, change in self._held:
            now += change
            steps[round(at_s, 3)] = now
        found = sorted(steps.items())
        return found[:: -(-len(found) // MAX_STEPS)]

    def kept(self) -> tuple[dict[str, list[Any]], int]:
        columns, num = self.columns, len(self.columns["gpu"])
        if num <= MAX_SPANS:
            return columns, 0
        longest = sorted(range(num), key=lambda n: (columns["from"][n] - columns["to"][n], n))[:MAX_SPANS]
        keep = sorted(longest)
        return {name: [values[n] for n in keep] for name, values in columns.items()}, num - MAX_SPANS

    @property
    def holders(self) -> list[str]:
        return list(self._holders)

    def _close(self, number: int, since_s: float, upto_s: float, held: Sequence[tuple[str, str, int]]) -> None:
        if upto_s <= 0 or upto_s <= since_s:
            return
        base, columns = 0, self.columns
        for holder, owner, num_bytes in held:
            last = self._same(number, since_s, holder, owner, base, num_bytes)
            if last is not None:
                columns["to"][last] = round(upto_s, 3)
            else:
                of = self._holders.setdefault(holder, len(self._holders))
                span = (number, round(since_s, 3), round(upto_s, 3), OWNERS.index(owner), of, base, num_bytes)
                self._latest[(number, holder, owner)] = len(columns["gpu"])
                for name, value in zip(columns, span, strict=True):
                    columns[name].append(value)
            base += num_bytes

    def _same(self, number: int, since_s: float, holder: str, owner: str, base: int, num_bytes: int) -> int | None:
        last = self._latest.get((number, holder, owner))
        if last is None:
            return None
        columns = self.columns
        goes_on = columns["to"][last] == round(since_s, 3)
        return last if goes_on and columns["base"][last] == base and columns["bytes"][last] == num_bytes else None


def request_columns(read: ReadRows, models: Sequence[str], began_at: float) -> tuple[Detail, int]:
    """(columns, number left out), from `request.finished` and `request.rejected`."""
    kept, num = _thinned(read)
    numbers = {key: number for number, key in enumerate(models)}
    columns: Detail = {
        "id": [row["request_id"] for row in kept],
        "model": [numbers.get(row["model_key"], 0) for row in kept],
        "at": [row.get("arrived_at") or row["answered_at"] for row in kept],
        "cold": [int(row.get("cold", False)) for row in kept],
        "instance": [row.get("instance_id", "") for row in kept],
        "error": [row.get("error_code") or row.get("code") or "" for row in kept],
    }
    columns["at"] = [round(at_s - began_at, 3) for at_s in columns["at"]]
    for name, field_name in (("queue", "queue_s"), ("ttft", "ttft_s"), ("e2e", "e2e_s")):
        columns[name] = [round(row.get(field_name, 0.0), 4) for row in kept]
    for name, field_name in (("prompt", "prompt_tokens"), ("response", "response_tokens")):
        columns[name] = [row.get(field_name, 0) for row in kept]
    return columns, num - len(kept)


def _thinned(read: ReadRows) -> tuple[list[Mapping[str, Any]], int]:
    """Two passes save memory."""
    times, num, num_marked = Quantiles(), 0, 0
    for row in read():
        num += 1
        num_marked += _is_marked(row)
        times.add(row.get("ttft_s", 0.0))
    if num <= MAX_REQUESTS:
        return list(read()), num
    slow = times.at(1 - MAX_REQUESTS / 6 / num)
    every = max(1, -(-num_marked // (MAX_REQUESTS // 2)))
    step = -(-(num - num_marked) // (MAX_REQUESTS // 3))
    kept, counts = [], [0, 0]
    for row in read():
        marked = _is_marked(row)
        counts[marked] += 1
        if counts[marked] % (every if marked else step) == 0 or (not marked and row.get("ttft_s", 0.0) > slow):
            kept.append(row)
    return kept, num


def _is_marked(row: Mapping[str, Any]) -> bool:
    return bool(row.get("cold") or row.get("error_code") or row.get("code"))


def decision_rows(read: ReadRows, requests: Detail, began_at: float) -> tuple[list[Detail], int]:
    """(decisions in order of time, number left out); shown requests and instances come first."""
    shown = {*requests["id"], *requests["instance"]} - {""}

    def near(row: Mapping[str, Any]) -> bool:
        return row.get("request_id") in shown or row.get("instance_id") in shown

    num = sum(1 for _ in read())
    num_near = sum(1 for row in read() if near(row)) if num > MAX_DECISIONS else num
    step = max(1, -(-num_near // MAX_DECISIONS))
    kept: list[Detail] = []
    seen = 0
    for row in read():
        if num > MAX_DECISIONS and not near(row):
            continue
        seen += 1
        if seen % step:
            continue
        decision = {name: value for name, value in row.items() if value not in ("", None) and name not in _UNSHOWN}
        decision["at"] = round(row["made_at"] - began_at, 3)
        decision["inputs"] = {name: _short(value) for name, value in row.get("inputs", {}).items()}
        decision["rivals"] = [_scored(rival, began_at) for rival in _rivals(row)]
        kept.append(decision)
    return kept, num - len(kept)


def _rivals(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(row.get("rivals", ()), key=lambda rival: rival["name"] != row.get("chosen"))[:MAX_RIVALS]


def _scored(rival: Mapping[str, Any], began_at: float) -> dict[str, Any]:
    """Times count from the run's beginning."""
    is_moment = rival.get("unit", "").startswith("at ") and rival["score"] > 0
    score = round(rival["score"] - began_at, 3) if is_moment else _short(rival["score"])
    return {**rival, "score": score}


_UNSHOWN = frozenset({"made_at", "traceparent", "decision_id", "cause_id"})


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def detail_of_run(folder: Path, setup: Setup) -> Detail:
    """Raises ScenarioError unless `folder` is a run's."""
    about, results = read_json(folder, "setup.json"), read_json(folder, "results.json")
    models_of: dict[str, str] = {}
    for row in read_lines(folder, "events.jsonl", INSTANCES):
        instance = row["data"]["instance"]
        models_of[instance["instance_id"]] = instance["model_key"]
    models = sorted(one.model.key for one in setup.models)
    numbers = {key: number for number, key in enumerate(models)}
    spans = Spans(setup)
    for row in read_lines(folder, "timeline.jsonl"):
        spans.gpu(row["gpu"], row["t_s"], [(holder, owner, num) for holder, owner, num in row["grants"]])
    spans.finish(results["end_s"])
    columns, num_left_out = request_columns(lambda: read_lines(folder, "requests.jsonl"), models, setup.began_at)
    kept, decisions_left_out = decision_rows(lambda: read_lines(folder, "decisions.jsonl"), columns, setup.began_at)
    held, spans_left_out = spans.kept()
    of_holder = [numbers.get(models_of.get(holder, ""), -1) for holder in spans.holders]
    held["model"] = [of_holder[holder] for holder in held["holder"]]
    return {
        "began_at": setup.began_at,
        "end_s": results["end_s"],
        "gpus": spans.gpus,
        "models": models,
        "holders": spans.holders,
        "spans": held,
        "spans_left_out": spans_left_out,
        "use": spans.use(),
        "requests": columns,
        "requests_left_out": num_left_out,
        "decisions": kept,
        "decisions_left_out": decisions_left_out,
        "label": about["variant"],
        "seed": about["seed"],
    }
