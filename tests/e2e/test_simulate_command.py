"""The what-if commands as people run them; a broken invariant prints the command that reproduces it."""

import asyncio
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Literal

import pytest
import yaml
from axe_playwright_python.async_playwright import Axe

from glowplug.cli.main import main
from tests import browser
from tests.unit.simulator.scenarios import write

THEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
LATE = "late.csv, line 4: response_tokens: 'x' is not"
GLOWPLUG = (sys.executable, "-m", "glowplug.cli.main")
LINES = {"events.jsonl", "decisions.jsonl", "requests.jsonl", "timeline.jsonl"}
FILES = {"setup.json", "results.json", "report.html", *LINES}
BREAKS = """
from glowplug_lab.simulator.world import Checker
from glowplug_lab.simulator.kernel import Kernel

first = Checker.look

def look(self):
    first(self)
    chat = self._run.models["chat"].model
    if self._run.label.endswith("seed 4") and chat.max_concurrency == 3:
        self.demand(self._traffic.num_arrived < 5, "the fifth request is one too many")

step = Kernel.step

def bare(self):
    assert self.now_s < {until_s}
    step(self)

Checker.look, Kernel.step = look, bare
"""
"""Every Python that starts with this beside it has one more invariant, workers of --jobs too."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def shell(folder: Path, line: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GLOWPLUG_")}
    ended = subprocess.run(
        ["sh", "-c", line.replace("glowplug ", f"{shlex.join(GLOWPLUG)} ", 1)],
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": str(folder / "broken"), **env},
        cwd=folder,
        timeout=110,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


def here(folder: Path, line: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in [name for name in os.environ if name.startswith("GLOWPLUG_")]:
            patch.delenv(name)
        for name, value in env.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        patch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code or 0) == code, out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_prints_its_table_and_leaves_a_whole_folder(folder: Path) -> None:
    said = shell(folder, "glowplug simulate tiny.yaml --seed 3")
    assert said.stdout.startswith("simulated: Two models on two GPUs")
    assert "report  runs/tiny/report.html" in said.stdout
    assert set(bytes_of(folder / "runs/tiny")) == FILES
    results = json.loads((folder / "runs/tiny/results.json").read_text())
    requests = (folder / "runs/tiny/requests.jsonl").read_text().splitlines()
    assert results["simulated"] is True
    assert results["total"]["num_arrived"] == len(requests) > 10


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_run(folder: Path) -> None:
    said = here(folder, "glowplug simulate tiny.yaml --out tiny.yaml/run", code=2)
    assert said.stderr == "glowplug: --out: tiny.yaml/run: Not a directory\n"
    assert [path.name for path in folder.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
        (signal.SIGKILL, -9),
    ],
)
def test_whoever_ends_the_command_ends_its_workers(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    write(tmp_path, seconds=30_000_000)
    argv = [*GLOWPLUG, "simulate", "tiny.yaml", "--seeds", "0..3", "--jobs", "2"]
    with subprocess.Popen(
        argv,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    ) as command:
        while len(list(tmp_path.glob("runs/.*/seed-*/events.jsonl"))) < 2:
            assert command.poll() is None
            time.sleep(0.1)
        (os.killpg if sent is signal.SIGINT else os.kill)(command.pid, sent)  # a terminal signals the whole group
        said, _ = command.communicate(timeout=90)  # until all its processes end: they share its output
    assert command.returncode == code, said
    if sent is not signal.SIGKILL:
        assert (said, (tmp_path / "runs").exists()) == (b"", False)


def test_the_union_on_the_mixed_fleet_is_the_same_in_two_processes_that_hash_differently(tmp_path: Path) -> None:
    scenario = str(Path(__file__).parents[2] / "scenarios" / "mixed_fleet.yaml")
    many = f"simulate {scenario} --set seconds=40 --set drain_s=20 --seeds 1..2"
    env = {"GLOWPLUG_DATA": str(tmp_path / "none")}
    here(tmp_path, f"glowplug {many} --out a", **env)
    shell(tmp_path, f"glowplug {many} --out b --jobs 2", **env, PYTHONHASHSEED="77")
    first = bytes_of(tmp_path / "a")
    assert first == bytes_of(tmp_path / "b")
    assert first["seed-1/decisions.jsonl"] != first["seed-2/decisions.jsonl"]


@pytest.mark.long
def test_two_processes_give_the_bytes_of_one(folder: Path) -> None:
    many = "simulate tiny.yaml --compare models.chat.max_concurrency=1,8 --seeds 0..1"
    one = here(folder, f"glowplug {many} --out a").stdout
    two = shell(folder, f"glowplug {many} --out b --jobs 2").stdout
    assert one.replace("a/report", "b/report") == two
    assert bytes_of(folder / "a") == bytes_of(folder / "b")
    assert len([name for name in bytes_of(folder / "a") if name.endswith("requests.jsonl")]) == 4


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("tiny.yaml --set policies.routing=luck", "policies.routing: there is no routing policy 'luck'"),
        ("tiny.yaml --compare policies.routing=least_loaded,luck", "policies.routing: there is no routing policy"),
        ("tiny.yaml --set models.chat.weights_bytes=99GB", "models.chat: weights and KV take"),
        ("tiny.yaml --set workload.source=empty.csv", "empty.csv: is empty"),
        ("tiny.yaml --set workload.source=late.csv", LATE),
        ("tiny.yaml --set workload.source=late.csv --set workload.rps=0", LATE),  # found only when it runs
        ("none.yaml", "none.yaml: No such file"),
        ("tiny.yaml --seed 1 --seeds 0..2", "--seed and --seeds exclude each other"),
        ("tiny.yaml --seeds x", "--seeds: 'x' is not like"),
        ("tiny.yaml --out mine", "mine exists and does not hold a run"),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(folder: Path, argv: str, said: str) -> None:
    (folder / "empty.csv").write_text("", encoding="utf-8")
    (folder / "late.csv").write_text("t_s,prompt_tokens,response_tokens\n0,1,1\n1,1,1\n2,1,x\n", encoding="utf-8")
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("years", encoding="utf-8")
    before = bytes_of(folder)
    ended = here(folder, f"glowplug simulate {argv}", code=2)
    assert ended.stdout == ""
    assert ended.stderr.startswith("glowplug: ")
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert bytes_of(folder) == before
    assert not (folder / "runs").exists()


def test_a_run_elsewhere_is_replaced_only_when_asked(folder: Path) -> None:
    here(folder, "glowplug simulate tiny.yaml --out a")
    assert "--force" in here(folder, "glowplug simulate tiny.yaml --out a", code=2).stderr
    here(folder, "glowplug simulate tiny.yaml --out a --force --no-record")
    assert set(bytes_of(folder / "a")) == FILES - LINES


def test_without_the_traces_the_run_says_so(tmp_path: Path) -> None:
    workload = {"source": "azure_2024_conv_10s", "rps": 1, "max_total_tokens": 1024}
    write(tmp_path, workload=workload)
    ended = here(tmp_path, "glowplug simulate tiny.yaml", GLOWPLUG_DATA=str(tmp_path / "none"))
    assert "azure_2024_conv_10s" in ended.stderr
    assert "generated" in ended.stderr
    assert "the traffic is generated" in (tmp_path / "runs/tiny/report.html").read_text(encoding="utf-8")


def test_a_plan_finds_the_least_and_says_what_it_tried(folder: Path) -> None:
    found = json.loads(here(folder, "glowplug plan tiny.yaml --slo ttft_attainment=0.6 --gpus 1..4 -o json").stdout)
    met = {point["gpus"]: point["met"] for point in found["points"]}
    assert found["answer"] == min(number for number, holds in met.items() if holds)
    assert (folder / "runs/tiny-plan/report.html").is_file()
    said = here(folder, "glowplug plan tiny.yaml --slo ttft_p50=0.000001 --gpus 1..2").stdout
    assert "no number in this range meets ttft_p50 of at most 1e-06 s" in said


@pytest.mark.long
def test_a_plan_for_a_trace_of_ones_own_is_the_same_in_two_processes(tmp_path: Path) -> None:
    rows = "".join(f"{n * 0.7:.1f},{100 + n},{20 + n % 50}\n" for n in range(80))
    (tmp_path / "own.csv").write_text(f"t_s,prompt_tokens,response_tokens\n{rows}", encoding="utf-8")
    write(tmp_path, workload={"source": "own.csv"})
    asked = "plan tiny.yaml --slo e2e_p95=600 --slo refused=1 --seeds 0,1 --gpus 2..2"
    one = here(tmp_path, f"glowplug {asked} --out a").stdout
    two = shell(tmp_path, f"glowplug {asked} --out b --jobs 2").stdout
    assert one.replace("a/report", "b/report") == two
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    assert json.loads((tmp_path / "a/results.json").read_text())["total"]["num_arrived"] == 80
    assert "note: 2 is the least of this range: fewer may do, too\n\n2 GPUs meet e2e_p95" in one


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_a_plan_that_is_broken_off_leaves_nothing(tmp_path: Path, jobs: str) -> None:
    write(tmp_path, seconds=30_000_000)
    argv = [*GLOWPLUG, "plan", "tiny.yaml", "--slo", "ttft_p95=3", "--gpus", "2..9", "--jobs", jobs]
    terminal, theirs = os.openpty()  # a bar, drawn only on a terminal, shows that it is midway
    with subprocess.Popen(
        argv,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as command:
        os.close(theirs)
        drawn = b""
        while b"simulating" not in drawn:
            drawn += os.read(terminal, 4096)
        os.killpg(command.pid, signal.SIGINT)
        with suppress(OSError):
            while os.read(terminal, 4096):
                continue
        said, _ = command.communicate(timeout=90)
    os.close(terminal)
    # Ctrl-C inside an `exec` (in a dataclass, for one) ends Python by the signal itself: 130 in a shell too.
    assert command.returncode in (130, -signal.SIGINT)
    assert said == b""
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_run_replayed_as_it_was_is_the_same_run_and_differs_under_another_policy(folder: Path) -> None:
    here(folder, "glowplug simulate tiny.yaml --out a")
    here(folder, "glowplug replay a --out b")
    a, b = bytes_of(folder / "a"), bytes_of(folder / "b")
    assert a["requests.jsonl"] == b["requests.jsonl"]
    said = here(folder, "glowplug replay a --set models.chat.max_concurrency=1 --out c").stdout
    assert [line.split()[0] for line in said.splitlines() if line.startswith(("rec", "repl"))] == [
        "recorded",
        "replayed",
    ]
    assert bytes_of(folder / "c")["requests.jsonl"] != a["requests.jsonl"]


def test_events_alone_are_enough_to_replay(folder: Path) -> None:
    """A live fleet's recording is such a file: fleet, models and costs are derived from it."""
    here(folder, "glowplug simulate tiny.yaml --out a")
    rows = json.loads(here(folder, "glowplug replay a/events.jsonl --out b -o json").stdout)["runs"]
    recorded, replayed = (row["total"] for row in rows)
    assert recorded["num_arrived"] == replayed["num_arrived"]
    assert replayed["ttft_s_p50"] == pytest.approx(recorded["ttft_s_p50"], rel=0.35)
    assert replayed["tpot_s_p50"] == pytest.approx(recorded["tpot_s_p50"], rel=0.2)
    assert {"scenario.yaml", "arrivals.csv"} < set(bytes_of(folder / "b"))
    page = (folder / "b/report.html").read_text()
    assert "replayed: from empty GPUs; 0 of 2 held something when the recording began" in page


def test_a_replayed_recording_can_be_moved_and_replayed_again(folder: Path) -> None:
    """The trace is saved with the run, and no folder of this machine is named."""
    here(folder, "glowplug simulate tiny.yaml --out a")
    here(folder, "glowplug replay a/events.jsonl --out b")
    assert not [name for name, data in bytes_of(folder / "b").items() if str(folder).encode() in data]
    (folder / "elsewhere").mkdir()
    (folder / "b").rename(folder / "elsewhere/b")
    here(folder, "glowplug replay elsewhere/b --out c")
    assert bytes_of(folder / "c")["requests.jsonl"] == bytes_of(folder / "elsewhere/b")["requests.jsonl"]


def rejected(**data: object) -> str:
    return json.dumps({"type": "request.rejected", "occurred_at": 1, "data": data}) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request (request.finished is telemetry"),
        ("{}\n", "line 1: is not an event of ours"),
        ("not json\n", "line 1: is not JSON"),
        (rejected(model_key="m"), "line 1: data: object missing"),
        (
            rejected(model_key="m", request_id="r", router_id="a", status=429, code="queue_full"),
            "holds no model.deployed",
        ),
    ],
)
def test_a_recording_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.jsonl").write_text(text, encoding="utf-8")
    ended = here(tmp_path, "glowplug replay r.jsonl", code=2)
    assert said in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_tap_and_why_read_a_run(folder: Path) -> None:
    here(folder, "glowplug simulate tiny.yaml --out a")
    lines = here(folder, "glowplug tap --run a -t model.deployed").stdout.splitlines()
    assert [line.split()[2] for line in lines] == ["model.deployed"] * 2
    event = json.loads(here(folder, "glowplug tap --run a -p tel -t request.finished -n 1 -o json").stdout)
    why = here(folder, f"glowplug why {event['data']['request_id']} --run a").stdout
    assert why.startswith("simulated, from a\n")
    assert "decided to place by union" in why
    assert (
        "'x' is not a request, model, instance, GPU or node of this run"
        in here(folder, "glowplug why x --run a", code=1).stderr
    )
    assert "is not the folder of a run" in here(folder, "glowplug why x --run none", code=2).stderr


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_the_report_opens_without_a_complaint_and_explains_a_request(tmp_path: Path) -> None:
    path = write(tmp_path)
    scenario = yaml.safe_load(path.read_text())
    scenario["policies"] = "serverless_vllm"  # whose rivals are GPUs, with their bytes
    scenario["models"].append({"name": "idle"})
    scenario["workload"]["alpha"] = 12  # the last of three models gets no request
    path.write_text(yaml.safe_dump(scenario))
    here(tmp_path, "glowplug simulate tiny.yaml --compare policies.routing=least_loaded,round_robin --out a")
    assert asyncio.run(opened(tmp_path / "a/report.html")) == []


async def opened(path: Path) -> list[str]:
    """The page's console messages. In the light theme, only colours are checked."""
    complaints: list[str] = []
    async with browser.browsing() as chromium:
        page = await browser.new_page(chromium, complaints)
        await page.goto(path.as_uri())
        await browser.until(page, "document.querySelectorAll('section.card').length >= 6")
        assert "simulated" in await page.inner_text(".badge")
        await page.click("#requests tbody tr")
        await browser.until(page, "document.querySelectorAll('.detail .decision .kind').length > 0")
        assert "Rivals" in await page.inner_text(".detail")
        assert "24.0 GB" in await page.inner_text(".detail .rival i")
        legend = await page.inner_text("#gpus .legend")
        assert "chat" in legend
        assert "idle" not in legend, "the legend names a model that no GPU held"
        for scheme in THEMES:
            await page.emulate_media(color_scheme=scheme)
            assert (await Axe().run(page)).response["violations"] == []
        await page.click("#models th:nth-child(3) button")
        assert await page.get_attribute("#models th:nth-child(3)", "aria-sort") == "descending"
        await page.hover("#latency svg", position={"x": 300, "y": 100})
        await browser.until(page, "!document.querySelector('#tip').hidden")
        for text in ("by owner", "low", "TPOT"):
            await page.click(f"button:text-is('{text}')")
        await page.focus("#gpus canvas.main")
        for key in ("+", "+", "ArrowRight", "-", "0"):
            await page.keyboard.press(key)
        for width in (1280, 390):
            await page.set_viewport_size({"width": width, "height": 900})
            wide = await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert wide, f"the page is wider than its window of {width}"
    return complaints


def breaking(folder: Path, until_s: str = "float('inf')") -> None:
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "sitecustomize.py").write_text(BREAKS.replace("{until_s}", until_s), encoding="utf-8")


def again_of(said: str) -> str:
    [line] = [line for line in said.splitlines() if line.startswith("again: ")]
    return line.removeprefix("again: ")


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.long), 2])
def test_simulate_prints_the_command_of_the_seed_that_failed(tmp_path: Path, jobs: int) -> None:
    breaking(tmp_path)
    write(tmp_path, name="two words.yaml")
    many = (
        "glowplug simulate 'two words.yaml' --set seconds=40 -s 'title=a; b' --seeds 3..4 --check"
        f" --compare models.chat.max_concurrency=2,3 --jobs {jobs}"
    )
    broken = shell(tmp_path, many, 1, GLOWPLUG_DATA=str(tmp_path / "no data"))
    assert "two words, 3, seed 4, at" in broken.stderr
    assert "the fifth request is one too many" in broken.stderr
    again = again_of(broken.stderr)
    assert again == (
        f"GLOWPLUG_DATA='{tmp_path}/no data' glowplug simulate 'two words.yaml' --set seconds=40 --set 'title=a; b'"
        " --set models.chat.max_concurrency=3 --seed 4 --check"
    )
    alone = shell(tmp_path, again, 1)
    assert what(alone.stderr) == what(broken.stderr)
    assert again_of(alone.stderr) == again
    assert not (tmp_path / "runs").exists()


def what(said: str) -> str:
    return said.partition(" at ")[2].splitlines()[0]


def test_plan_prints_the_number_of_gpus_and_the_seed_that_failed(folder: Path) -> None:
    breaking(folder)
    tried = "glowplug plan tiny.yaml --slo 'ttft_p95=9s' --slo refused=0.5 --gpus 1..3 --server node --seeds 3,4 -j 2"
    broken = shell(folder, f"{tried} --check --set models.chat.max_concurrency=3", 1)
    again = again_of(broken.stderr)
    [gpus] = [word for word in shlex.split(again) if ".." in word]
    assert gpus in ("1..1", "3..3")
    assert again == (
        "glowplug plan tiny.yaml --set models.chat.max_concurrency=3 --slo ttft_p95=9s --slo refused=0.5"
        f" --server node --gpus {gpus} --seeds 4 --check"
    )
    assert what(shell(folder, again, 1).stderr) == what(broken.stderr)


def test_replay_prints_its_command_and_a_bare_assertion_says_where_it_stands(folder: Path) -> None:
    """The simulator's own assertions have no message: the run is named all the same."""
    here(folder, "glowplug simulate tiny.yaml --seed 2 --out a")
    breaking(folder, until_s="1_699_920_000.0")
    tried = "glowplug replay a --check --set models.chat.max_concurrency=1 --compare seconds=30,40"
    broken = shell(folder, tried, 1)
    assert "tiny, 30, seed 2: sitecustomize.py, line" in broken.stderr
    assert "assert self.now_s < 1_699_920_000.0" in broken.stderr
    again = again_of(broken.stderr)
    assert again == "glowplug replay a --set models.chat.max_concurrency=1 --set seconds=30 --check"
    assert "assert self.now_s < 1_699_920_000.0" in shell(folder, again, 1).stderr
