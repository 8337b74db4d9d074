"""A parked engine process: it has imported a host module once, and each engine is a fork of it.

    python -m glowplug.engines.zygote_host MODULE         (its standard input is a socket of the driver: zygote.py)

A JSON line each way on that socket. The process first sends {"parked": pid} or {"error"}. Then, one at a time:

    {"run_dir", "log", "env"}   -> {"pid"} or {"error"}    a fork runs MODULE.main() as `python -m MODULE run_dir` would

A fork equals a fresh process: own session, directory, log, environment and signal handlers. It sends its own answer,
and begins only if that could be sent. The parked process ends with the socket; its forks live on. It has one thread and
no device open, else it refuses to fork. Linux; standard library only.
"""

import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_ANSWERS = b"a"  # from a fork: it answers, or has ended
_MAX_NAME_CHARS = 15

Main = Callable[[], int]


class NotForkable(RuntimeError):
    """The import left something that a fork must not inherit."""


def load(module: str) -> Main:
    """Raises ImportError, and NotForkable when the import starts threads or opens anything."""
    before = _opened()
    main: Main = import_module(module).main
    if (num_threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        raise NotForkable(f"importing {module} has started {num_threads - 1} threads")
    if opened := _opened() - before:
        raise NotForkable(f"importing {module} has opened {', '.join(sorted(opened))}")
    return main


def _opened() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(link.readlink()))
    return found


def serve(control: socket.socket, module: str, main: Main) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: an engine's end shows in its log
    _say(control, {"parked": os.getpid()})
    with control.makefile("rb") as lines:
        for line in lines:
            _start(control, module, main, json.loads(line))


def _start(control: socket.socket, module: str, main: Main, question: dict[str, Any]) -> None:
    ours, its = socket.socketpair()
    with ours:
        try:
            pid = os.fork()
        except OSError as error:
            its.close()
            _say(control, {"error": f"fork: {error}"})
            return
        if not pid:
            ours.close()
            _become(control, its, module, main, question)
        its.close()
        if ours.recv(1) != _ANSWERS:
            _say(control, {"error": "the fork ended before it could begin"})


def _become(
    control: socket.socket, zygote: socket.socket, module: str, main: Main, question: dict[str, Any]
) -> NoReturn:
    code = 1
    try:
        try:
            _enter(module, question)
            answer: dict[str, Any] = {"pid": os.getpid()}
        except OSError as error:
            answer = {"error": str(error)}
        zygote.sendall(_ANSWERS)
        zygote.close()
        _say(control, answer)
        os.close(control.detach())  # `close` would leave it open for readers
        if "error" in answer:
            os._exit(code)
        sys.argv = [module, question["run_dir"]]
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the end of this process: nothing may fall back into the zygote's loop
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _enter(module: str, question: dict[str, Any]) -> None:
    """Change the process as an exec would."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.chdir(question["run_dir"])
    os.environ.clear()
    os.environ.update(question["env"])
    Path("/proc/self/comm").write_text(module.rpartition(".")[2][:_MAX_NAME_CHARS])


def _say(control: socket.socket, answer: dict[str, Any]) -> None:
    control.sendall(json.dumps(answer).encode() + b"\n")


def main() -> int:
    """Return 1 when the module cannot be parked."""
    control, null = socket.socket(fileno=os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    with control, suppress(ConnectionError):  # the driver has ended
        try:
            host = load(sys.argv[1])
        except Exception as error:  # noqa: BLE001 - whatever an import raises, the driver reads the reason
            _say(control, {"error": f"{type(error).__name__}: {error}"})
            return 1
        gc.collect()
        gc.freeze()  # keeps the collector from writing to pages shared with forks
        serve(control, sys.argv[1], host)
    return 0


if __name__ == "__main__":
    sys.exit(main())
