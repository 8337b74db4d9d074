"""Writes docs/configuration.md from the settings classes: `python docs/configuration.py > docs/configuration.md`."""

import importlib
from enum import Enum
from typing import Any

from pydantic_settings import BaseSettings

from glowplug.events.shapes import comments_of
from glowplug.runtime.settings import ElectedSettings, ServiceSettings, SourceSettings
from glowplug.runtime.supervisor.settings import FleetSettings

# ruff: noqa: E501 - a row of a table is one line
SERVICES = ("router", "predictor", "placer", "autoscaler", "prefetcher", "agent", "console")
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
INTRO = """\
# Configuration

Written by `python docs/configuration.py > docs/configuration.md`; change the settings classes, not this file.

Everything is an environment variable. `glowplug up` hands its own environment on to every process it starts and adds
addresses, ports and tokens, so a variable set there reaches the service that knows it. A service started by hand
(`python -m services.<name>`) reads the same variables. Seconds and bytes everywhere. Models are configured by files,
see [howto/models.md](howto/models.md).
"""
OTHERS = """\
## Read elsewhere

| variable | read by | meaning |
|---|---|---|
| `GLOWPLUG_<SERVICE>_URL` | command line | address of one service, for a fleet that `glowplug up` has not started: `GLOWPLUG_ROUTER_URL`, `GLOWPLUG_AUTOSCALER_URL` ... |
| `GLOWPLUG_CACHE_DIR` | vLLM samples | where converted sample weights are kept (default `~/.cache/glowplug`) |
| `GLOWPLUG_VLLM_ENV` | agent, `make vllm-env` | the environment vLLM is installed in (default `.venv-vllm` of the checkout) |
| `GLOWPLUG_TRACE_IMPORTS` | parked vLLM process | set: write how long imports take |
| `GLOWPLUG_DATA` | `glowplug simulate`, benches, tests | the folder of the public traces (default `shared/data` beside the checkout); without it traffic is generated |
| `GLOWPLUG_SIM_SEEDS` | tests/simulation | the seeds to run instead of the usual ones: 17, 3,5 or 0..199 |
| `GLOWPLUG_SERVER_PASSWORD` | deploy/k8s | a service's password at NATS and Valkey, put into its two addresses |
| `GLOWPLUG_FLEET` | `glowplug up` | set on every process it starts, so that what a killed fleet left behind is found and ended |
| `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_TRACES_SAMPLER_ARG` | every service | as OpenTelemetry defines them |
| `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL_S3` | prefetcher, autoscaler, command line | for `s3:` weights; without a key requests go unsigned |
| `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SERVICE_ACCOUNT`, `GOOGLE_SKIP_SIGNATURE`, `GOOGLE_BASE_URL` | prefetcher, autoscaler, command line | for `gs:` weights; without credentials those of the machine; `GOOGLE_SKIP_SIGNATURE=true` asks for public objects unsigned |
| `HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE` | prefetcher, autoscaler, command line | for `hf:` weights, as huggingface_hub defines them |
"""


def variable(cls: type[BaseSettings], name: str) -> str:
    """The environment variable of one setting."""
    alias = cls.model_fields[name].validation_alias
    return str(alias) if alias else f"GLOWPLUG_{name.upper()}"


def _default(value: Any) -> str:
    if value is None or value == "":
        return "empty"
    if isinstance(value, bool):
        return f"`{int(value)}`"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _meaning(cls: type[BaseSettings], name: str, comment: str) -> str:
    info = cls.model_fields[name]
    bounds = [f"{word} {getattr(m, key)}" for m in info.metadata for key, word in BOUNDS.items() if hasattr(m, key)]
    words = [w for w in (comment, ", ".join(bounds)) if w]
    return "; ".join(words).replace("|", "/")


def own_fields(cls: type[BaseSettings]) -> list[str]:
    """Settings the class itself names, overridden defaults included."""
    return [name for name in cls.model_fields if name in cls.__annotations__]


def _table(title: str, cls: type[BaseSettings]) -> list[str]:
    comments = comments_of(cls)
    out = [f"## {title}", "", "| variable | default | meaning |", "|---|---|---|"]
    for name in own_fields(cls):
        meaning = _meaning(cls, name, comments.get(name, ""))
        out.append(f"| `{variable(cls, name)}` | {_default(cls.model_fields[name].default)} | {meaning} |")
    return [*out, ""]


def classes() -> dict[str, type[BaseSettings]]:
    """Title -> settings class, in the order of the page."""
    found: dict[str, type[BaseSettings]] = {
        "The local fleet (`glowplug up`)": FleetSettings,
        "Every service": ServiceSettings,
        "Autoscaler, placer and predictor": ElectedSettings,
        "Prefetcher and autoscaler: sources of weights": SourceSettings,
    }
    for service in SERVICES:
        module = importlib.import_module(f"services.{service}.settings")
        found[f"The {service}"] = getattr(module, f"{service.capitalize()}Settings")
    return found


def document() -> str:
    """The whole page."""
    out = [INTRO]
    for title, cls in classes().items():
        out += _table(title, cls)
    return "\n".join([*out, OTHERS.rstrip(), ""])


if __name__ == "__main__":
    print(document(), end="")
