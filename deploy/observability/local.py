"""A Prometheus configuration for the local fleet: `python deploy/observability/local.py [STATE_DIR] > prometheus.yml`.

The rules are those of the compose fleet, and jobs have the same names, so that dashboards and alerts work unchanged.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

HERE = Path(__file__).resolve().parent
SERVICES = ("router", "predictor", "placer", "autoscaler", "prefetcher", "agent", "console")


def configuration(fleet: dict[str, Any], interval: str = "5s") -> dict[str, Any]:
    """Make it from the document that a running fleet keeps in its state directory."""
    targets: dict[str, list[str]] = {service: [] for service in SERVICES}
    for process in fleet["processes"]:
        if process["service"] in targets and process.get("url"):
            targets[process["service"]].append(urlsplit(process["url"]).netloc)
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval, "external_labels": {"fleet": "local"}},
        "rule_files": [str(HERE / "rules/*.yml")],
        "scrape_configs": [
            {"job_name": service, "static_configs": [{"targets": found}]} for service, found in targets.items()
        ],
    }


if __name__ == "__main__":
    state = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("GLOWPLUG_STATE_DIR", ".glowplug"))
    try:
        document = json.loads((state / "fleet.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        sys.exit(f"no fleet runs in {state}: start one with `make up`")
    print(yaml.safe_dump(configuration(document), sort_keys=False), end="")
