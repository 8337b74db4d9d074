"""Print the page of settings, drawn from the settings' classes: `python docs/configuration.py`, or `make docs`."""

import importlib
import math
from enum import Enum
from typing import Any

from glowplug.domain.bounds import Bounds, marks_of
from glowplug.events.document import comments_of
from glowplug.runtime.settings import (
    ElectedSettings,
    EngineSecret,
    NodeSettings,
    ServiceSettings,
    Settings,
    SharedSettings,
    SourceSettings,
    Variable,
)
from glowplug.runtime.supervisor.settings import FleetSettings

# ruff: noqa: E501 - a row of a table is one line
SERVICES = ("router", "predictor", "placer", "autoscaler", "prefetcher", "agent", "console", "operator")
LOCAL = "The local fleet (`glowplug up`)"
INTRO = """\
# Configuration

Printed by `python docs/configuration.py`.

Every setting is an environment variable, in seconds and bytes. `glowplug up` hands its environment on to every process and
adds addresses, ports, tokens and secrets, and an embedded NATS and Valkey, where they are empty;
a service started by hand (`python -m glowplug.services.<name>`) reads the same variables.
[Files](howto/models.md) configure the models; [policies](policies.md) explains each policy. The default is in
parentheses, unless it is empty. A value out of bounds ends the service at its start with one line that names the variable.
"""
ADVANCED = """\
## Advanced

Few fleets need another value than the default. Defaults and meanings are in `services/<name>/settings.py`,
`libs/glowplug/controllers/<name>/params.py`, `libs/glowplug/runtime/settings.py` (every service) and
`libs/glowplug/runtime/supervisor/settings.py` (the local fleet).
"""
OTHERS = """\
## Read elsewhere

- `GLOWPLUG_<SERVICE>_URL`: to the command line, the address of a service of a fleet that `glowplug up` has not started.
- `XDG_CONFIG_HOME` (`~/.config`): folder with `glowplug/context.json`, the
  [contexts](howto/README.md#several-fleets-json-and-tab).
- `GLOWPLUG_CACHE_DIR` (`~/.cache/glowplug`): weights made of the sample weights.
- `GLOWPLUG_VLLM_ENV` (`.venv-vllm` of the checkout): environment of vLLM.
- `GLOWPLUG_DATA` (`shared/data` beside the checkout): the public traces, of `glowplug simulate`, benches and tests.
- Prefetcher, autoscaler, router and command line: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`
  and `AWS_ENDPOINT_URL_S3` for `s3:`, without a key unsigned; `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SERVICE_ACCOUNT`,
  `GOOGLE_BASE_URL` for `gs:`, else the machine's credentials, or unsigned with `GOOGLE_SKIP_SIGNATURE=true`; `HF_TOKEN`,
  `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE` for `hf:`, as huggingface_hub defines them.
- For developers: `GLOWPLUG_TRACE_IMPORTS` (the parked vLLM process logs how long its imports take), `GLOWPLUG_SIM_SEEDS` (seeds
  of tests/simulation: 17, 3,5 or 0..199), `GLOWPLUG_RELEASE` (1: a figure older than its code fails).
- Set by Glowplug itself: `GLOWPLUG_FLEET` (marks the processes of one `glowplug up`), `GLOWPLUG_SERVER_PASSWORD` (a service's
  password on Kubernetes).
"""


def _default(value: Any) -> str:
    """The default in parentheses; nothing for an empty one."""
    if value is None or value == "":
        return ""
    shown = int(value) if isinstance(value, bool) else value.value if isinstance(value, Enum) else value
    return f" (`{shown}`)"


def _meaning(one: Variable) -> str:
    bounds = next((mark for mark in marks_of(one.kind) if isinstance(mark, Bounds)), Bounds())
    said = [comments_of(one.owner).get(one.path[-1], "")]
    if bounds.least > 1:
        said.append(f"≥{bounds.least:g}")
    if bounds.most not in (math.inf, 65535):
        said.append(f"≤{bounds.most:g}")
    return "; ".join(filter(None, said)).replace("|", "/")


def own(cls: type[Settings]) -> list[Variable]:
    """Settings that the class itself defines, with overridden defaults and its params."""
    return [one for one in cls.variables() if one.path[0] in cls.__annotations__]


def _tables(found: dict[str, type[Settings]]) -> list[str]:
    """A list for each class, each variable once: if a later class has another default, its line says so."""
    rows: dict[str, tuple[str, str, list[str]]] = {}  # variable -> title, default, meanings
    for title, cls in found.items():
        for one in own(cls):
            default = _default(one.default)
            if one.mark.advanced:
                continue
            if one.env not in rows:
                rows[one.env] = (title, default, [_meaning(one)])
            elif title != LOCAL and default != rows[one.env][1]:
                rows[one.env][2].append(
                    f"{title.removeprefix('The ')}:{default.replace('(', '').replace(')', '') or ' empty'}"
                )
    out: list[str] = []
    for title in found:
        named = [(name, row) for name, row in rows.items() if row[0] == title]
        lines = [f"- `{name}`{default}: {'; '.join(filter(None, said))}" for name, (_, default, said) in named]
        out += [f"## {title}", "", *(line.removesuffix(": ") for line in lines), ""]
    return out


def _advanced(found: dict[str, type[Settings]]) -> list[str]:
    """One line of names for each class."""
    out = [ADVANCED]
    for title, cls in found.items():
        names = [f"`{one.env}`" for one in own(cls) if one.mark.advanced]
        out += [f"- {title}: {', '.join(names)}"] if names else []
    return [*out, ""]


def classes() -> dict[str, type[Settings]]:
    """Title -> settings class, in the order of the page."""
    found: dict[str, type[Settings]] = {
        "Every service and the local fleet": SharedSettings,
        "Every service": ServiceSettings,
        "Autoscaler, placer, predictor and operator": ElectedSettings,
        "Prefetcher and autoscaler: sources of weights": SourceSettings,
        "Agent and prefetcher, with the same values": NodeSettings,
        "Router, agent and the local fleet": EngineSecret,
    }
    for service in SERVICES:
        module = importlib.import_module(f"glowplug.services.{service}.settings")
        found[f"The {service}"] = getattr(module, f"{service.capitalize()}Settings")
    return found | {LOCAL: FleetSettings}


def document() -> str:
    found = classes()
    return "\n".join([INTRO, *_tables(found), *_advanced(found), OTHERS.rstrip(), ""])


if __name__ == "__main__":
    print(document(), end="")
