"""What a fork of the zygote does to become a server. Never returns to the zygote's loop."""

import gc
import multiprocessing.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

from glowplug_vllm import server
from glowplug_vllm.parked import patches, tokenizers
from glowplug_vllm.parked.preload import modules, preload
from glowplug_vllm.parked.protocol import Question

Boot = Callable[[Question], NoReturn]


def park(extra: Iterable[str] = (), kept: Iterable[Path] = ()) -> Boot:
    """Import vLLM, patch it and return the function that a fork runs. 15-25 s on two cores.

    Raises patches.Unpatchable, ImportError, and RuntimeError when an import initialised CUDA.
    """
    platforms = import_module("vllm.platforms")
    is_cpu = bool(platforms.current_platform.is_cpu())
    for name, reason in preload([*modules(is_cpu), *extra]).items():
        print(f"not preloaded: {name} ({reason})", flush=True)
    patches.apply(is_cpu)
    tokenizers.install()
    for directory in kept:
        tokenizers.keep(directory)
    serve = server.load_serve()
    assert_no_cuda()
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that forks share

    def boot(question: Question) -> NoReturn:
        assert_no_cuda()
        become(question, serve, is_cpu)

    return boot


def assert_no_cuda() -> None:
    """A fork of a process that has initialised CUDA cannot use it. Raises RuntimeError."""
    torch = import_module("torch")
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA was initialised before the fork: no server may be started from this process")


def become(question: Question, serve: server.Serve, is_cpu: bool) -> NoReturn:
    """Serve in this fork, and end with the server's status."""
    code = 1
    try:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if not is_cpu else "spawn"  # the CPU platform insists
        # One tracker for each server, owned by the API server. Started later it is the engine core's child, vLLM ends
        # it on shutdown, and two shared-memory segments of every server stay behind.
        resource_tracker.ensure_running()
        if os.environ.get("GLOWPLUG_TRACE_IMPORTS"):
            sys.meta_path.insert(0, _ImportTrace())
        code = server.run(Path(question.run_dir), serve)
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # what an interpreter's end runs
    except BaseException:  # noqa: BLE001 (the end of this process: nothing may fall back into the zygote's loop)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _ImportTrace:
    """Names each module that a server still imports after the fork."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        print(f"late import {os.getpid()} {time.time():.3f} {name}", file=sys.stderr, flush=True)
