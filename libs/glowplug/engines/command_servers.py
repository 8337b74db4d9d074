"""The servers that a node may start by a command line, declared in a TOML file of the node (`GLOWPLUG_SERVERS`).

A model file names one of them and no command, so whoever may deploy models cannot run what he likes on a node.

    [sglang]
    command = ["python", "-m", "sglang.launch_server", "--model-path", "{weights}", "--served-model-name", "{name}",
               "--host", "{host}", "--port", "{port}", "--context-length", "{context_tokens}"]
    env = {SGLANG_API_KEY = "{api_key}"}
    health = "/health"
    in_flight = ["sglang:num_running_reqs", "sglang:num_queue_reqs"]
    swap = {sleep = {path = "/release_memory_occupation"}, wake = {path = "/resume_memory_occupation"}}

`prewarm` is a pair like `swap`, for servers that give up their KV cache alone. `sleep = "checkpoint"` in the place of
`swap` lets the CUDA driver move the server's GPU memory to host memory (checkpoint.py).
"""

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from glowplug.domain.errors import EngineMisconfigured

PLACES = ("weights", "name", "host", "port", "context_tokens", "max_concurrency", "kv_bytes", "gpu_index", "api_key")
_SHOWN = dict.fromkeys(PLACES, "")


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Call(_Declared):
    """One request to the server; any answer below 400 is a success."""

    path: str = Field(pattern="^/")
    method: Literal["POST", "GET"] = "POST"
    body: dict[str, Any] = {}


class Pair(_Declared):
    sleep: Call
    wake: Call


class ServerCommand(_Declared):
    """How one server is started, asked, and put to sleep. `{...}` in `command` and `env` is one of PLACES; arguments of
    the model (`engine_args.args`) follow the command, as far as `args` allows their flags."""

    command: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str] = {}
    args: tuple[str, ...] = ()  # flags that a model may add behind the command
    health: str = Field(default="/health", pattern="^/")
    in_flight: tuple[str, ...] = ()  # samples of /metrics: requests running and waiting
    swap: Pair | None = None  # gives all of its GPU memory back
    prewarm: Pair | None = None  # gives its KV cache back
    sleep: Literal["checkpoint"] | None = None  # instead of `swap`, on GPUs alone

    @model_validator(mode="after")
    def _sleeps_in_one_way(self) -> "ServerCommand":
        if self.swap and self.sleep:
            raise ValueError("swap and sleep are two ways to do the same: declare one")
        return self

    @field_validator("command", "env")
    @classmethod
    def _has_known_places(cls, value: Any) -> Any:
        for text in value.values() if isinstance(value, dict) else value:
            try:
                text.format_map(_SHOWN)
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                raise ValueError(f"{text!r}: {error!r} is none of {', '.join(PLACES)}") from error
        return value


def read_servers(path: Path) -> dict[str, ServerCommand]:
    """The servers of that file by name. Raises EngineMisconfigured naming what is wrong with it."""
    try:
        tables = tomllib.loads(path.read_text())
        return {name: ServerCommand.model_validate(table) for name, table in tables.items()}
    except OSError as error:
        raise EngineMisconfigured(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EngineMisconfigured(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EngineMisconfigured(f"{path}: {where}: {first['msg']}") from error
