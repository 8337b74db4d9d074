"""Print each capability by engine, drawn from the drivers: `python docs/capabilities.py`, or `make docs`."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from glowplug.domain.model import Model, WeightsRef
from glowplug.engines.apis import CHAT, EMBEDDINGS, MESSAGES, RERANK, RESPONSES
from glowplug.engines.drivers import Declaration, declaration, driver
from glowplug.engines.port import Ability, EngineCapabilities, EngineSettings
from glowplug_lab.simulator.setup import ABILITIES

LIBS = Path(__file__).parents[1] / "libs"
INTRO = """\
# What each engine can do

Printed by `python docs/capabilities.py` from the drivers' declarations. "Real" means that a test or a benchmark has run
it; "host", that this is so on host memory, and that the code for GPUs exists and has not run on one; "host only", that
there is no such code.

Keys, tenants, limits, roles, usage (exact where the answer has `usage` or llama.cpp's `timings`, else estimated and
marked so), batches, charts and backups work with every engine.

"""
START = {  # the engines of the table, in its order
    "llamacpp": "default",
    "vllm": "`make vllm-env`, then `make up ENGINE=vllm`",
    "command": "a file of the node, [engines/command.md](engines/command.md)",
    "emulated": "`make up ENGINE=emulated`",
}
WHAT = {
    "llamacpp": "llama.cpp in a process of its own; SmolLM2-135M-Instruct comes in a package",
    "vllm": "a vLLM server in its own environment",
    "command": "any server, by its command line and its port",
    "emulated": "a process with vLLM's HTTP API and no model: texts are made up, timings follow published measurements",
}
ROWS = {  # field of EngineCapabilities -> its meaning to a reader
    "cancels_unstreamed": "stops at once when a client leaves that asked for no stream",
    "metrics": "gives vLLM's metrics",
    "parked": "starts from a parked process",
    "groups": "spreads one instance over several GPUs",
}
APIS = {  # path of the data port -> its meaning to a reader
    CHAT: "answers chat and completions",
    RESPONSES: "... OpenAI's responses",
    MESSAGES: "... Anthropic's messages and token counts",
    EMBEDDINGS: "... embeddings",
    RERANK: "... rerank",
}
MODES: dict[str, tuple[dict[str, Any], ...]] = {
    # engine_args, the usual ones first; others serve other paths
    "llamacpp": ({}, {"embeddings": True}, {"embeddings": True, "pooling": "rank"}),
    "vllm": ({"runner": "generate"}, {"runner": "pooling"}),
    "command": ({},),
    "emulated": ({},),
}
NO_ROW = {"emulated", "shares_when_asked"}  # shown as words in other cells
CAN = {
    Ability.PREWARM: "holds prewarmed weights and grows from them (WarmServe)",
    Ability.SWAP: "sleeps and wakes, its process alive (SwapServeLLM)",
    Ability.FIRST_LAYERS: "... holds the first layers alone (WarmServe section 4)",
    Ability.STREAM: "loads its weights while they arrive (HydraServe section 5)",
    Ability.SHARE: "reads its weights in host memory, with every other instance of its model",
    Ability.ADAPTERS: "takes and gives up LoRA adapters while it serves ([adapters](adapters.md))",
    Ability.STAGES: "starts in pipeline stages (HydraServe)",
}
REMAPS = "switches models by remapping pages of GPU memory (WarmServe section 4.2)"
REMAPPING = re.compile(r"^(from|import) glowplug_lab\.gpu_slots\b", re.MULTILINE)
DECLARED = {("command", Ability.PREWARM), ("command", Ability.SWAP)}  # by the node's file, of each server


def table() -> str:
    """The rows, with a column for each engine and one for the simulator."""
    engines = [declaration(name) for name in START]
    out = [
        f"| | {' | '.join(f'`{engine.name}`' for engine in engines)} | simulator |",
        f"|---|{'---|' * (len(engines) + 1)}",
        _row("runs", [WHAT[engine.name] for engine in engines], "nothing: virtual time"),
        _row("tokens", [_word(engine, True) for engine in engines], "simulated"),
        _row("weights", [engine.weights.kind for engine in engines], "none"),
    ]
    out += [_row(APIS[path], [_answers(engine, path) for engine in engines], "no") for path in APIS]
    declared = [f.name for f in fields(EngineCapabilities) if f.type is bool and f.name not in NO_ROW]
    for field in sorted(declared, key=lambda name: [*ROWS, name].index(name)):
        meaning = ROWS.get(field, field.replace("_", " "))
        cells = [_word(engine, bool(getattr(engine.capabilities, field))) for engine in engines]
        out.append(_row(meaning, cells, "simulated" if field == "groups" else "no"))
    for ability, meaning in CAN.items():
        out.append(_row(meaning, [_can(engine, ability) for engine in engines], _simulated(ability)))
    out.append(_row(REMAPS, ["real; not measured" if _remaps(engine.name) else "no" for engine in engines], "no"))
    out.append(_row("started by", [START[engine.name] for engine in engines], "`glowplug simulate`"))
    return "\n".join(out) + "\n"


def _can(engine: Declaration, ability: Ability) -> str:
    """Real if measured; code for GPUs exists and has not been measured."""
    if (engine.name, ability) in DECLARED:
        return "real, where declared"
    made = driver(engine.name, EngineSettings(emulated_streams=True))  # as much as settings allow
    if engine.capabilities.emulated:
        return _word(engine, ability in made.abilities("emulated"))
    on_host, on_gpus = (ability in made.abilities(kind) for kind in ("host", "cuda"))
    if not on_host:
        return _word(engine, False)
    asked = ability is Ability.SHARE and engine.capabilities.shares_when_asked
    return ("host" if on_gpus else "host only") + (", with `weights_shared`" if asked else "")


def _remaps(engine: str) -> bool:
    """Whether the engine's code takes memory from the pool that remaps (`libs/glowplug_lab/gpu_slots`)."""
    files = [*LIBS.glob(f"glowplug/engines/{engine}*.py"), *LIBS.glob(f"glowplug/engines/{engine}_host/*.py")]
    files += LIBS.glob(f"glowplug_{engine}/**/*.py")
    return any(REMAPPING.search(file.read_text("utf-8")) for file in files)


def _simulated(ability: Ability) -> str:
    always = {Ability.FIRST_LAYERS, Ability.STREAM}  # in any scenario
    return "simulated" if ability in ABILITIES | always else "no"


def _word(engine: Declaration, is_there: bool) -> str:
    if not is_there:
        return "no"
    return "emulated" if engine.capabilities.emulated else "real"


def _answers(engine: Declaration, path: str) -> str:
    """Whether an engine answers that path, and with which engine_args if not with the usual ones."""
    if engine.name == "command":
        return "as its server does"
    for args in MODES[engine.name]:
        model = Model(
            name="m",
            key="m",
            engine=engine.name,
            weights=WeightsRef(uri=""),
            weights_bytes=0,
            kv_bytes=0,
            engine_args=args,
        )
        if path not in engine.api(model).lacks:
            told = ", ".join(f"{name}: {str(value).lower()}" for name, value in args.items())
            usual = args is MODES[engine.name][0]
            return _word(engine, True) + ("" if usual else f", with `{told}`")
    return "no"


def _row(meaning: str, cells: list[str], simulated: str) -> str:
    return f"| {meaning} | {' | '.join(cells)} | {simulated} |"


def document() -> str:
    return INTRO + table()


if __name__ == "__main__":
    print(document(), end="")
