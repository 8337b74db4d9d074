"""The page's data: variants over seeds, one run in full, a plan's curve; and the HTML file that holds it all."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

import yaml

from glowplug import __version__
from glowplug.simulator.jobs import Outcome
from glowplug.simulator.scenario.load import Scenario

SCRIPTS = ("words.js", "curves.js", "timeline.js", "requests.js", "main.js")
Data = dict[str, Any]


def page_data(
    scenario: Scenario,
    outcomes: Sequence[Outcome],
    detail: Data | None = None,
    plan: Data | None = None,
    notes: Iterable[str] = (),
) -> Data:
    """Everything the page shows. `detail` is of one run (see detail.py), `plan` of a sweep over fleets."""
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


def variants_over_seeds(outcomes: Sequence[Outcome]) -> list[Data]:
    """One entry per variant: every figure as mean, least and most over seeds; models and curves of the first seed."""
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


def spread(rows: Sequence[Mapping[str, Any]]) -> Data:
    """Each number as it is (one row), or as its mean and range; None where no row has a figure."""
    out: Data = {}
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


def html(data: Data) -> str:
    """One file that needs nothing else: the same data give the same bytes."""
    folder = resources.files("glowplug.simulator.report").joinpath("page")

    def text(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    title = f"{data['title'] or data['name']} · simulated · Glowplug"
    page = text("page.html").replace("@@TITLE@@", title.replace("&", "&amp;").replace("<", "&lt;"))
    page = page.replace("@@CSS@@", text("page.css")).replace("@@JS@@", "\n".join(text(name) for name in SCRIPTS))
    return page.replace("@@DATA@@", embedded.replace("<!--", "<\\u0021--"))
