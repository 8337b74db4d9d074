"""Every system of row U on a live fleet, with two models of which one fits at a time.

Lane: system (two systems, 100 s; test_systems_llamacpp.py has the union), long (the others).
"""

from pathlib import Path

import pytest

from glowplug_lab.systems import SYSTEMS
from tests.fleet_runner import Fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(500)]
SOME = {"serverless_vllm", "muxserve_like"}
MODEL = """
name: {name}
engine: emulated
weights_bytes: 512MiB
kv_bytes: 256MiB
max_concurrency: 8
keep_alive_s: 600
max_wait_s: 180
engine_args: {{profile: "llama-2-7b/h800", launch_s: 0.2, warmup_s: 0.1}}
"""


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.long) for n in sorted(SYSTEMS)])
def test_a_fleet_told_one_word_runs_that_system_and_answers(name: str, tmp_path: Path) -> None:
    models = {model: MODEL.format(name=model) for model in ("one", "two")}
    with Fleet.start(tmp_path, models, nodes=1, GLOWPLUG_POLICIES=name, GLOWPLUG_GPU_BUDGETS="1GiB") as fleet:
        assert fleet.policies() == SYSTEMS[name].policies
        wait_until("one answers", lambda: fleet.chat("one").status_code == 200)
        if name != "muxserve_like":  # its placement never evicts a model
            wait_until("two answers", lambda: fleet.chat("two").status_code == 200)
        for process in ("router-1", "predictor-1", "placer-1", "autoscaler-1", "prefetcher-1", "agent-1"):
            assert "Traceback" not in fleet.logs(process, lines=10_000)
