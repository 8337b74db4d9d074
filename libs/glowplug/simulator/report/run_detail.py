"""One recorded run as the page takes it, read back from its folder."""

from pathlib import Path

from glowplug.events.subjects import entity_facts
from glowplug.simulator.report.detail import Detail, detail_of
from glowplug.simulator.run_folder import read_json, read_lines
from glowplug.simulator.setup import Setup

INSTANCES = '{"subject":"' + entity_facts("instance").partition("*")[0]


def detail_of_run(folder: Path, setup: Setup) -> Detail:
    """Everything of the run in `folder`. Raises ScenarioError when it is none."""
    about, results = read_json(folder, "setup.json"), read_json(folder, "results.json")
    models_of: dict[str, str] = {}
    for row in read_lines(folder, "events.jsonl", INSTANCES):
        instance = row["data"]["instance"]
        models_of[instance["instance_id"]] = instance["model_key"]
    detail = detail_of(
        setup,
        lambda: read_lines(folder, "requests.jsonl"),
        lambda: read_lines(folder, "decisions.jsonl"),
        read_lines(folder, "timeline.jsonl"),
        models_of,
        results["end_s"],
    )
    return {**detail, "label": about["variant"], "seed": about["seed"]}
