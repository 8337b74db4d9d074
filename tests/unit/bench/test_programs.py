"""Every benchmark starts: `--help` in the fast lane (5 s), its smallest form in the long lane (20 minutes in all)."""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glowplug.engines import vllm_env
from tests import browser

ROOT = Path(__file__).parents[3]
PARTS = frozenset({"bench.gpu.children", "bench.router.floor", "bench.throughput.server"})  # others start these
# Arguments of the smallest form. It writes its data to {json}, and may use the folder {here}.
SMALLEST = {
    "bench.adapter_start": "llamacpp --rounds 1 --json {json}",
    "bench.adapters.run": "--seconds 5 --ways adapters --json {json}",
    "bench.budget": "--only 'chunk of a stream' --json {json}",
    "bench.bus_latency": "--json {json}",
    "bench.coldstart.run": "--kinds streamed --rounds 1 --tokens 2 --json {json}",
    "bench.console.run": "--nodes 2 --gpus 1 --models 2 --loads 1 --marks 2 --minutes 0 --json {json}",
    "bench.engine_start": "llamacpp --starts 1 --json {json}",
    "bench.fairness.live": "--seconds 5 --policies vtc --json {json}",
    "bench.fairness.run": "--seconds 60 --seeds 1 --policies vtc fifo --cases batch --json {json}",
    "bench.fidelity": "--loads zipf --busy 0 --rounds 1 --seconds 10 --out {here} --json {json}",
    "bench.figures": "--check",
    "bench.first_use": "--rounds 1 --warm 1 --json {json}",
    "bench.fit.lengths": "{here}/conversations.json --judge libs/glowplug/policies/prediction/length_model.npz",
    "bench.forecast": "priors",
    "bench.gpu": "1 --kind host --host-mib 4 --json {json}",
    "bench.papers": "--only M2 --quick",
    "bench.prefix.decision": "--instances 10 --blocks 100 --choices 50 --json {json}",
    "bench.prefix.live": "--policies union --rounds 1 --chats 1 --turns 2 --think-s 1 --json {json}",
    "bench.prefix.run": "--cases slots_apart --policies union --seeds 1 --json {json}",
    "bench.readers": "--json {json}",
    "bench.recovery": "--only router-1 --json {json}",
    "bench.router.run": "--runs 1 --rounds 1 --seconds 1 --requests-only --json {json}",
    "bench.routing.run": "--instances 10 --requests 100 --json {json}",
    "bench.seeds": "--seeds 0 --jobs 1 -k declared",
    "bench.simulator.run": "--only warmserve, --seconds 5 --json {json}",
    "bench.soak": "--seconds 60 --json {json}",
    "bench.swap": "llamacpp --cycles 1 --json {json}",
    "bench.systems": "--systems union --rounds 1 --seconds 10 --out {here} --json {json}",
    "bench.throughput": "--rounds 1 --at 1 --beside fleet --json {json}",
    "bench.usage.run": "--requests 100 --kills 1 --out {json}",
}
NEEDS = {
    "bench.coldstart.run": lambda: vllm_env.missing(vllm_env.interpreter()),
    "bench.console.run": lambda: "" if browser.CHROMIUM else browser.MISSING,
    "bench.router.run": lambda: "" if shutil.which("nginx") else "no nginx on this machine",
}


def programs() -> set[str]:
    """Modules that run, each package with a __main__.py as one."""
    found = set[str]()
    for path in (ROOT / "bench").rglob("*.py"):
        if path.name == "__main__.py" or '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            has_main = path.name == "run.py" and path.with_name("__main__.py").exists()
            found.add(name.removesuffix(".run") if has_main else name.removesuffix(".__main__"))
    return found


def test_each_program_has_a_smallest_form() -> None:
    assert programs() - PARTS == SMALLEST.keys()


@pytest.mark.parametrize("name", sorted(SMALLEST))
def test_a_benchmark_prints_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


def talk(number: int) -> dict[str, object]:
    said = [{"from": "human", "value": f"say {number}"}, {"from": "gpt", "value": "a " * number}]
    return {"id": f"c{number}_0", "conversations": said}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(SMALLEST))
def test_a_benchmark_runs_in_its_smallest_form(name: str, tmp_path: Path) -> None:
    if why := NEEDS.get(name, str)():
        pytest.skip(why)
    (tmp_path / "conversations.json").write_text(json.dumps([talk(number) for number in range(1, 200)]))
    data = tmp_path / "data.json"
    argv = SMALLEST[name].format(json=data, here=tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", name, *shlex.split(argv)], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.strip()
    if "{json}" in SMALLEST[name]:
        assert json.loads(data.read_text())
