"""Any server by its command line: SGLang, TGI, a custom binary (SwapServeLLM: engine-agnostic hot swap).

It sleeps by its HTTP API, or by a checkpoint of its GPU memory (checkpoint.py). Without `in_flight` a drain takes its
whole grace.
"""

import asyncio
import json
import tomllib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from glowplug.domain.errors import EngineFailed, EngineMisconfigured
from glowplug.engines import checkpoint, process, rendezvous
from glowplug.engines.checkpoint import CheckpointFailed, Checkpoints
from glowplug.engines.declaration import Argument, EngineArguments, EngineWeights, WeightsForm, text
from glowplug.engines.freezer import Freezer
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import Ability, EngineCapabilities, EngineHandle, Place
from glowplug.events.commands import StartInstance

# A node's servers, declared in a TOML file of the node (`GLOWPLUG_SERVERS`). A model file names one of them and no
# command, so the right to deploy models is not a right to run commands on a node.
#
#     [sglang]
#     command = ["python", "-m", "sglang.launch_server", "--model-path", "{weights}", "--served-model-name", "{name}",
#                "--host", "{host}", "--port", "{port}", "--context-length", "{context_tokens}"]
#     env = {SGLANG_API_KEY = "{api_key}"}
#     health = "/health"
#     in_flight = ["sglang:num_running_reqs", "sglang:num_queue_reqs"]
#     swap = {sleep = {path = "/release_memory_occupation"}, wake = {path = "/resume_memory_occupation"}}
#
# `prewarm` is a pair like `swap`, for servers that give up only their KV cache. `sleep = "checkpoint"` instead of
# `swap` lets the CUDA driver move the server's GPU memory to host memory (checkpoint.py).

FIELDS = ("weights", "name", "host", "port", "context_tokens", "max_concurrency", "kv_bytes", "gpu_index", "api_key")
_SHOWN = dict.fromkeys(FIELDS, "")


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerCall(_Declared):
    path: str = Field(pattern="^/")
    method: Literal["POST", "GET"] = "POST"
    body: dict[str, Any] = {}


class Pair(_Declared):
    sleep: ServerCall
    wake: ServerCall


class ServerCommand(_Declared):
    """`{...}` in `command` and `env` is one of FIELDS; the model's `engine_args.args` follow the command, if `args`
    allows their flags."""

    command: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str] = {}
    args: tuple[str, ...] = ()
    health: str = Field(default="/health", pattern="^/")
    in_flight: tuple[str, ...] = ()  # samples of /metrics: requests running and waiting
    swap: Pair | None = None  # gives all of its GPU memory back
    prewarm: Pair | None = None  # gives up its KV cache
    sleep: Literal["checkpoint"] | None = None  # instead of `swap`, GPUs only

    @model_validator(mode="after")
    def _sleeps_in_one_way(self) -> "ServerCommand":
        if self.swap and self.sleep:
            raise ValueError("swap and sleep are two ways to sleep: declare one")
        return self

    @field_validator("command", "env")
    @classmethod
    def _has_known_places(cls, value: Any) -> Any:
        for word in value.values() if isinstance(value, dict) else value:
            try:
                word.format_map(_SHOWN)
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                raise ValueError(f"{word!r}: a name in braces is one of {', '.join(FIELDS)}") from error
        return value


def read_servers(path: Path) -> dict[str, ServerCommand]:
    """Raises EngineMisconfigured."""
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
        why = first["msg"].removeprefix("Value error, ")
        raise EngineMisconfigured(f"{path}: {where}: {why}") from error


_ASLEEP = "asleep.json"  # in the run directory while it sleeps: {"becomes"}
_ABILITIES = {"prewarmed": Ability.PREWARM, "swapped_out": Ability.SWAP}
_PIDS = "pids"
_MOVED = "moved"  # those whose GPU memory was moved out
_CUDA = "cuda"
_SERVER = "server"
_MAX_NAME_CHARS = 100
_WAKE_POLL_S = 0.02


def _wrong_args(value: Any) -> str | None:
    is_list = isinstance(value, list | tuple) and all(isinstance(one, str) and "\0" not in one for one in value)
    return None if is_list else ""


class CommandDriver(HostedDriver):
    """Runs the servers declared on the node. `engine_args`: `server`, and `args` after its command."""

    name = "command"
    capabilities = EngineCapabilities(cancels_unstreamed=False)
    arguments = EngineArguments(
        engine="command",
        known={
            "server": text("the name of a server that the node declares", _MAX_NAME_CHARS),
            "args": Argument(meaning="arguments after its command", allowed="a list of texts", wrong=_wrong_args),
        },
    )
    weights = EngineWeights(kind="what the server reads", form=WeightsForm.ANY)
    module = "glowplug.engines.command_host"

    @cached_property
    def servers(self) -> dict[str, ServerCommand]:
        """Raises EngineMisconfigured."""
        path = self._settings.servers
        return read_servers(Path(path)) if path else {}

    def abilities(self, gpu_kind: str) -> frozenset[Ability]:
        able = [self._abilities_of(server, gpu_kind) for server in self.servers.values()]
        return frozenset(set.intersection(*able)) if able else frozenset()

    def _abilities_of(self, server: ServerCommand, gpu_kind: str) -> set[Ability]:
        able = {ability for ability, pair in _pairs(server).items() if pair}
        if server.sleep and gpu_kind == _CUDA and self.checkpoints[0] is not None:
            able.add(Ability.SWAP)
        return able

    @cached_property
    def checkpoints(self) -> tuple[Checkpoints | None, str]:
        return checkpoint.find()

    def unavailable(self) -> str:
        try:
            declared = self.servers
        except EngineMisconfigured as error:
            return error.message
        return "" if declared else "no server is declared (GLOWPLUG_SERVERS)"

    def spec(self, command: StartInstance, place: Place) -> dict[str, Any]:
        base, model = super().spec(command, place), command.model
        server = self._named(str(model.engine_args.get("server", "")))
        _check_args(server, model.engine_args.get("args", ()))
        numbers = {
            "context_tokens": model.context_tokens,
            "max_concurrency": model.max_concurrency,
            "kv_bytes": model.kv_bytes,
            "gpu_index": place.devices.ordinals[0],
        }
        fields = {name: str(value) for name, value in numbers.items()} | {"name": model.name, "host": place.host}
        kept = ("instance_id", "launched_at", "wait_s", "host", "port", "max_concurrency")
        return {key: base[key] for key in kept} | {
            "command": server.command,
            "args": list(model.engine_args.get("args", ())),
            "env": server.env,
            "health": server.health,
            "fields": fields,
        }

    def _handle(self, command: StartInstance, place: Place, pid: int, **data: str) -> EngineHandle:
        server = str(command.model.engine_args["server"])
        return super()._handle(command, place, pid, **data, **{_SERVER: server})

    def health_path(self, handle: EngineHandle) -> str:
        return self._of(handle).health

    def samples_in_flight(self, handle: EngineHandle) -> tuple[str, ...]:
        if not (samples := self._of(handle).in_flight):
            raise EngineFailed(f"{self.name} {handle.instance_id}: its server declares no `in_flight`")
        return samples

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        """Record the sleep on disk: the wake must match it, and a restarted agent must not repeat it, since some
        servers fail then."""
        slept = rendezvous.read(Path(handle.run_dir), _ASLEEP)
        if slept is not None and slept["becomes"] == becomes and _PIDS not in slept:
            return
        if self._of(handle).sleep and _ABILITIES[becomes] is Ability.SWAP:
            await asyncio.to_thread(self._move_out, handle)
            return
        await self._call(handle, self._pair(handle, _ABILITIES[becomes]).sleep)
        rendezvous.write(Path(handle.run_dir), _ASLEEP, {"becomes": becomes})

    async def wake(self, handle: EngineHandle) -> None:
        """Wait until the server is healthy; one that has not slept needs no more."""
        asleep = Path(handle.run_dir) / _ASLEEP
        slept = rendezvous.read(asleep.parent, _ASLEEP)
        if slept is not None and _PIDS in slept:
            await asyncio.to_thread(self._move_in, handle, slept[_PIDS], slept.get(_MOVED, ()))
            asleep.unlink()
        elif slept is not None:
            await self._call(handle, self._pair(handle, _ABILITIES[slept["becomes"]]).wake)
            asleep.unlink()
        deadline = asyncio.get_running_loop().time() + self._settings.load_timeout_s
        while not (health := await self.health(handle)).ok:
            if not health.alive or asyncio.get_running_loop().time() > deadline:
                raise EngineFailed(f"{self.name} {handle.instance_id} is not healthy after its wake: {health.reason}")
            await asyncio.sleep(_WAKE_POLL_S)

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        """Skip the grace of a frozen server, which cannot use it."""
        slept = rendezvous.read(Path(handle.run_dir), _ASLEEP)
        pids = slept.get(_PIDS, ()) if slept is not None else ()
        freezer = Freezer(handle.instance_id, pids=pids) if pids else None
        await super().stop(handle, grace_s if freezer is None else 0.0)
        if freezer is not None:
            freezer.forget()

    def _move_out(self, handle: EngineHandle) -> None:
        """Record the sleep first, so that a wake undoes a half-done one. Blocking. Raises EngineFailed."""
        made, why = self.checkpoints
        if made is None:
            raise EngineFailed(f"{self.name} {handle.instance_id} cannot be checkpointed: {why}")
        pids = process.group_members(handle.pid, handle.pid_started_at)
        slept = {"becomes": "swapped_out", _PIDS: pids}
        rendezvous.write(Path(handle.run_dir), _ASLEEP, slept)
        try:
            moved = checkpoint.swap_out(made, pids)
        except CheckpointFailed as error:
            (Path(handle.run_dir) / _ASLEEP).unlink()
            raise EngineFailed(f"{self.name} {handle.instance_id} cannot be checkpointed: {error}") from error
        rendezvous.write(Path(handle.run_dir), _ASLEEP, slept | {_MOVED: moved})
        Freezer(handle.instance_id).freeze(pids)

    def _move_in(self, handle: EngineHandle, pids: list[int], moved: Sequence[int] = ()) -> None:
        """Blocking. Raises EngineFailed."""
        made, why = self.checkpoints
        pids = [pid for pid in process.group_members(handle.pid, handle.pid_started_at) if pid in pids]
        Freezer(handle.instance_id, pids=pids).thaw(pids)
        try:
            if made is None:
                raise CheckpointFailed(why)
            checkpoint.swap_in(made, pids, moved)
        except CheckpointFailed as error:
            raise EngineFailed(f"{self.name} {handle.instance_id} cannot be restored: {error}") from error

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        """-1: no server declares it."""
        return -1

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        raise EngineFailed(f"{self.name}: a command engine keeps the KV cache of its start")

    def _named(self, name: str) -> ServerCommand:
        if name not in self.servers:
            there = ", ".join(sorted(self.servers)) or "none"
            raise EngineMisconfigured(f"engine_args.server: no server {name!r} is declared on this node ({there})")
        return self.servers[name]

    def _of(self, handle: EngineHandle) -> ServerCommand:
        try:
            return self._named(handle.data.get(_SERVER, ""))
        except EngineMisconfigured as error:
            raise EngineFailed(error.message) from error

    def _pair(self, handle: EngineHandle, ability: Ability) -> Pair:
        pair = _pairs(self._of(handle))[ability]
        if pair is None:
            raise EngineFailed(f"{self.name} {handle.instance_id}: its server declares no {ability.value}")
        return pair

    async def _call(self, handle: EngineHandle, call: ServerCall) -> None:
        body = json.dumps(call.body).encode() if call.method == "POST" else b""
        timeout_s = self._settings.load_timeout_s
        status, answer = await self._ask(handle, call.path, timeout_s, method=call.method, body=body)
        if status >= 400:
            shown = answer[:200].decode("utf-8", "replace")
            raise EngineFailed(f"{self.name} {handle.instance_id}: {call.path} says {status}: {shown}")


def _check_args(server: ServerCommand, given: Sequence[str]) -> None:
    """Raises EngineMisconfigured for a flag that the node does not allow."""
    for argument in given:
        flag = argument.partition("=")[0]
        if argument.startswith("-") and flag not in server.args:
            allowed = ", ".join(server.args) or "none"
            raise EngineMisconfigured(f"engine_args.args: {flag} may not be set by a model on this node ({allowed})")


def _pairs(server: ServerCommand) -> dict[Ability, Pair | None]:
    return {Ability.PREWARM: server.prewarm, Ability.SWAP: server.swap}
