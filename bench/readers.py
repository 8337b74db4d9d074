"""Measure the cost of request ends to the services that read all of a fleet's: `make bench BENCH=readers`.

Each reader decodes and takes the ends of requests of 50 models on 200 instances, once from reports of 500 ends
(`router.requests_finished`) and once from reports of one, in seconds of this process. The cost of the bus's client and
of a shell per message is left out.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench.measured.data import data_option, write_data
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.events import Event, encode
from glowplug.events.envelope import decode
from glowplug.events.facts import RequestFinished, RouterRequestsFinished
from glowplug.services.console import main as console_main
from glowplug.services.console.app import Console
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.settings import ConsoleSettings
from tests.fleet_builder import a_model, a_node, an_instance
from tests.unit.controllers.placer.rig import a_placer

NUM_MODELS, NUM_INSTANCES, NUM_REPORTS, IN_REPORT = 50, 200, 40, 500
BEGAN_S = 1_800_000_000.0
Take = Callable[[Event, float], object]


def ended(number: int, at_s: float) -> RequestFinished:
    """A request that ended at `at_s`."""
    given: dict[str, Any] = {
        "arrived_at": at_s - 5,
        "finished_at": at_s,
        "queue_s": 0.011,
        "ttft_s": 0.212,
        "e2e_s": 5.0,
        "router_id": "router-1",
        "instance_id": f"i-{number % NUM_INSTANCES}",
        "tenant": "acme",
        "key_id": "k-1",
    }
    return RequestFinished(
        model_key=f"m{number % NUM_MODELS}",
        request_id=f"req-{at_s:.1f}-{number}",
        status=200,
        prompt_tokens=900,
        response_tokens=210,
        tokens_exact=True,
        cold=False,
        stream=True,
        **given,
    )


def messages(in_one: int) -> list[tuple[float, bytes]]:
    """(epoch seconds, event) of all reports, or with `in_one` of 1 of all single ends."""
    made = []
    for number in range(NUM_REPORTS * IN_REPORT // in_one):
        at_s = BEGAN_S + 0.2 * (number * in_one // IN_REPORT)
        requests = tuple(ended(number * in_one + i, at_s) for i in range(in_one))
        data = RouterRequestsFinished(router_id="router-1", requests=requests)
        made.append(
            (at_s, encode(Event(event_id=f"{number:032d}", type=data.TYPE, occurred_at=at_s, issuer="r", data=data)))
        )
    return made


def readers(folder: str) -> dict[str, Take]:
    models = {f"m{i}": a_model(f"m{i}") for i in range(NUM_MODELS)}
    rows = {f"i-{i}": replace(an_instance(f"i-{i}"), model_key=f"m{i % NUM_MODELS}") for i in range(NUM_INSTANCES)}
    predictor = PredictorController()
    placer = a_placer(a_node("node-1", revision=1), place="hydraserve", models=list(models.values()))
    predictor.restore("models", models, BEGAN_S)
    for controller in (predictor, placer):
        controller.restore("instances", rows, BEGAN_S)
    console = Console(
        ConsoleSettings(state_dir=Path(folder)), ConsoleMetrics(CollectorRegistry()), clock=lambda: BEGAN_S
    )
    return {
        "predictor": predictor.handle,
        "placer": placer.handle,
        "console": lambda *told: console_main.take(console, *told),
    }


def cost_us(take: Take, in_one: int) -> float:
    """Microseconds of this process for the end of one request."""
    told = messages(in_one)
    began = time.process_time()
    for at_s, raw in told:
        take(decode(raw), at_s)
    return (time.process_time() - began) / (NUM_REPORTS * IN_REPORT) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data_option(parser)
    args = parser.parse_args()
    found = {}
    for name in ("predictor", "placer", "console"):
        with tempfile.TemporaryDirectory(prefix="gp-bench-", ignore_cleanup_errors=True) as folder:
            singly, in_reports = (cost_us(readers(folder)[name], in_one) for in_one in (1, IN_REPORT))
        found[name] = {"singly_us": singly, "in_reports_us": in_reports, "a_second": 1e6 / in_reports}
        print(f"{name:9} {singly:6.1f} us singly, {in_reports:6.1f} us in reports: {1e6 / in_reports:,.0f} a second")
    write_data(args.json, found)


if __name__ == "__main__":
    main()
