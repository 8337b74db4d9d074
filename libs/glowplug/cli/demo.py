"""`glowplug demo`: an unattended tour on a fresh fleet, with a table of times."""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml

from glowplug.cli.client import bearer
from glowplug.cli.options import EngineOption, JsonOption, NodesOption
from glowplug.cli.talk import ChatAnswer, streamed
from glowplug.cli.terminal import CliError, say, say_json, seconds, table
from glowplug.cli.up import settings_of, wait_for_models
from glowplug.domain.instance import InstanceState
from glowplug.runtime import plain_yaml
from glowplug.runtime.supervisor.fleet import LocalFleet, run_fleet
from glowplug.runtime.supervisor.output import Output
from glowplug.runtime.supervisor.samples import prepare, sample_files
from glowplug.runtime.supervisor.settings import LOG_MAX_BYTES
from glowplug.runtime.supervisor.statedir import StateDir

KEEP_ALIVE_S = 4.0
MAX_TOKENS = 16
IDLE_TIMEOUT_S = 60.0
PROMPT = "Why is the sky blue?"
PHASES = ("decide", "room", "fetch", "launch", "load", "warmup")
HEADERS = ("step", "model", "engine", "result", "ttft", "queue", *PHASES, "prefill", "whole")


@dataclass
class DemoRow:
    """One request; seconds, None if missing."""

    step: str
    model: str
    engine: str
    error: str = ""
    ttft_s: float | None = None
    whole_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    phases_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, step: str, model: str, engine: str, answer: ChatAnswer) -> "DemoRow":
        queue = answer.timings_s.get("queue", 0.0)
        spent = queue + answer.timings_s.get("router", 0.0)
        return cls(
            step=step,
            model=model,
            engine=f"{engine} (EMULATED)" if answer.emulated or engine == "emulated" else engine,
            error="" if answer.text else "no text came",
            ttft_s=answer.ttft_s,
            whole_s=answer.total_s,
            queue_s=queue,
            prefill_s=None if answer.ttft_s is None else max(0.0, answer.ttft_s - spent),
            phases_s={name: answer.timings_s[name] for name in PHASES if name in answer.timings_s},
        )

    def cells(self) -> tuple[str, ...]:
        phases = (seconds(self.phases_s.get(name)) for name in PHASES)
        result = self.error or "ok"
        head = (self.step, self.model, self.engine, result, seconds(self.ttft_s), seconds(self.queue_s))
        return (*head, *phases, seconds(self.prefill_s), seconds(self.whole_s))


def demo(
    engine: EngineOption = None,
    nodes: NodesOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the state folder with its logs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a fresh fleet, send a cold request, a warm one and a burst over more models than memory holds, wait until
    every model is asleep, and show where the time went."""
    folder = Path(tempfile.mkdtemp(prefix="gp-demo-"))
    settings = settings_of(folder, engine=engine, nodes=nodes, port_base=0, models_dir=folder / "models")
    prepare(settings.engine, folder / "models")
    state = StateDir(settings.state_dir)
    state.lock(settings.min_free_bytes)
    assert settings.models_dir is not None
    write_models(settings.models_dir, settings.engine)
    shown = Output(folder / "logs", max_bytes=LOG_MAX_BYTES, show_logs=False, stream=sys.stderr)
    rows: list[DemoRow] = []
    code = 1

    async def on_ready(fleet: LocalFleet) -> int:
        rows.extend(await story(fleet, shown))
        return 1 if any(row.error for row in rows) else 0

    try:
        code = asyncio.run(run_fleet(settings, shown, state, on_ready))
    finally:
        shown.close()
        state.unlock()
        if keep or code:
            say(f"state and logs: {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        say_json([asdict(row) for row in rows])
    else:
        say(table(HEADERS, [row.cells() for row in rows]))
        say("\n" + explanation(settings.engine))
    raise typer.Exit(code)


def explanation(engine: str) -> str:
    text = (
        "ttft: request sent to first text. queue: held by the router. decide, room (waits for GPU memory), fetch,\n"
        "launch, load, warmup: phases of the start it waited for; they overlap. prefill: from dispatch to first text."
    )
    if engine == "emulated":
        text += "\nThe engine is EMULATED: these times are modelled, not measured on real models."
    return text


def write_models(models_dir: Path, engine: str) -> None:
    models_dir.mkdir(parents=True)
    for file in sample_files(engine):
        document = plain_yaml.load(file.read_text("utf-8"))
        document |= {"keep_alive_s": KEEP_ALIVE_S, "preload": False, "min_instances": 0}
        (models_dir / file.name).write_text(yaml.safe_dump(document, sort_keys=False), "utf-8")


async def story(fleet: LocalFleet, shown: Output) -> list[DemoRow]:
    """A failed request is a row with an error; the story continues."""
    urls, engine = fleet.plan.urls(), fleet.settings.engine
    data = urls["data"]
    key = fleet.document()["api_key"]
    models = await wait_for_models(urls, key)
    if not models:
        raise CliError("the fleet lists no model: see the log of autoscaler-1")
    async with httpx.AsyncClient(base_url=data, headers=bearer(key), trust_env=False) as client:
        shown.say(f"cold: {models[0]} gets its first request")
        rows = [await ask(client, "cold", models[0], engine)]
        shown.say(f"warm: {models[0]} again")
        rows.append(await ask(client, "warm", models[0], engine))
        shown.say(f"burst: two requests for each of {len(models)} models, more than memory holds")
        burst = [ask(client, "burst", model, engine) for model in models for _ in range(2)]
        rows += await asyncio.gather(*burst)
        shown.say("idle: waiting until every model is asleep")
        rows.append(await idle(fleet.plan.urls()["placer"], client, engine))
        shown.say(f"cold again: {models[0]}, its weights still in host memory")
        rows.append(await ask(client, "cold again", models[0], engine))
    return rows


async def ask(client: httpx.AsyncClient, step: str, model: str, engine: str) -> DemoRow:
    answer = ChatAnswer()
    try:
        async for _ in streamed(client, model, [{"role": "user", "content": PROMPT}], answer, MAX_TOKENS):
            pass
    except CliError as error:
        return DemoRow(step, model, engine, error=str(error))
    return DemoRow.of(step, model, engine, answer)


async def idle(placer_url: str, client: httpx.AsyncClient, engine: str) -> DemoRow:
    started = time.monotonic()
    left: Sequence[Any] = ()
    while time.monotonic() - started < IDLE_TIMEOUT_S:
        rows = (await client.get(f"{placer_url}/v1/instances")).json()["data"]
        left = [row for row in rows if not InstanceState(row["state"]).is_dormant]
        if not left:
            which = f"all, {len(rows)} dormant" if rows else "all"
            return DemoRow("idle to zero", which, engine, whole_s=time.monotonic() - started)
        await asyncio.sleep(0.2)
    names = ", ".join(row["instance_id"] for row in left)
    return DemoRow("idle to zero", "all", engine, error=f"after {IDLE_TIMEOUT_S:g} s still loaded: {names}")
