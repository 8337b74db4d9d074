"""One stage of a pipeline whose stages run on several nodes: vLLM's pipeline parallelism, each stage with its part of
the layers (HydraServe section 4).

Its layers are those that were fetched for it: order.json beside the files says how the model is cut (by bytes, see
glowplug/weights/order.py), and stages with different cuts do not start. The stages find one another through a
store that the first one's process holds. A later stage has no server: it says by a file that its weights are loaded
(rundir.py), and renews that file while it lives. No stage outlives its pipeline: a later one ends once the store is
gone, and the first one once a later one has given no sign for `SILENT_S`. Only the tensors of its own layers are read:
the others may be holes in the files.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from glowplug_vllm import arriving, rundir

START = "_GLOWPLUG_START"  # in the environment of a stage: where and when it was started, as JSON
PARTITION = "VLLM_PP_LAYER_PARTITION"  # vLLM's: "4,11,11,4" layers of each stage; its own cut without it
ORDER_S = 60.0  # so long order.json may take, once the headers are there that it is made from
WATCH_S = 1.0  # between two signs of a stage
SILENT_S = 15.0
_CUT = "glowplug-cut"
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # as configurations call it
_POLL_S = 0.005


def started(run_dir: Path, launched_at: float, imported_at: float, load_began_at: float) -> str:
    """What START holds. Epoch seconds."""
    phases = [["launch", launched_at, imported_at]]
    return json.dumps({"run_dir": str(run_dir), "phases": phases, "load_began_at": load_began_at})


class BadCut(RuntimeError):
    """The stages of a pipeline have not been given parts that make one model."""


def partition(directory: Path, num_stages: int, arrives: bool) -> str:
    """PARTITION for these files; "" where nobody has cut them, so that vLLM does. While weights arrive it waits for who
    fetches them to say so. Raises BadCut, TimeoutError."""
    region, deadline = directory.parent, time.monotonic() + ORDER_S
    while arrives and not (region / "order.json").exists() and not (region / "complete.json").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing says in which order the weights of {region.name[:12]} arrive")
        time.sleep(_POLL_S)
    try:
        stages = json.loads((region / "order.json").read_bytes())["stages"]
        config = json.loads((directory / "config.json").read_bytes())
    except (FileNotFoundError, KeyError):
        return ""
    counts = stages.get(str(num_stages))
    if stages and counts is None:
        raise BadCut(f"the weights are cut into {', '.join(stages)} stages, not into {num_stages}")
    return ",".join(map(str, _run(counts or [], config)))


def _run(counts: list[int], config: dict[str, Any]) -> list[int]:
    """Of the layers in the files those that the model runs: without what lies behind the last one (to predict several
    tokens). None where that leaves the last stage without any, or says too few. A sum that is wrong vLLM refuses."""
    text = config.get("text_config") or config.get("llm_config") or config
    num_layers = next((text[name] for name in _NUM_LAYERS if name in text), None)
    if not counts or num_layers is None or sum(counts) == num_layers:
        return counts
    extra = sum(counts) - num_layers
    return [*counts[:-1], counts[-1] - extra] if 0 < extra < counts[-1] else []


def agree(store: Any, rank: int) -> None:
    """Every worker of a pipeline has the same cut. Raises BadCut."""
    own = os.environ.get(PARTITION, "")
    if rank == 0:
        store.set(_CUT, own)
    elif (first := store.get(_CUT).decode()) != own:
        raise BadCut(f"the first stage has a model of {first or 'even'} layers, and this one of {own or 'even'}")


def report_loaded(local_rank: int) -> Path:
    """The weights of one worker of this stage are loaded. Returns the file that says so."""
    start = json.loads(os.environ[START])
    run_dir, name = Path(start["run_dir"]), rundir.loaded(local_rank)
    phases = [*start["phases"], ["load", start["load_began_at"], time.time()]]
    rundir.write(run_dir, name, {"phases": phases})
    return run_dir / name


@contextlib.contextmanager
def own_tensors(directory: Path) -> Iterator[None]:
    """vLLM's loader within it reads the tensors of the model's own layers, and no byte of another one. Where weights
    arrive its loader does so by itself, and waits for each (arriving_load.py)."""
    if arriving.is_on():
        yield
        return
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    from glowplug_vllm.region import Region

    read = DefaultModelLoader.get_all_weights

    def get_all_weights(loader: Any, config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        region = Region(directory)
        if not region.is_readable:  # of a type that only vLLM reads, all of it
            yield from read(loader, config, model)
            return
        for name in region:
            if not is_pp_missing_parameter(name, model):
                yield name, region.read_as_is(name)

    DefaultModelLoader.get_all_weights = get_all_weights
    try:
        yield
    finally:
        DefaultModelLoader.get_all_weights = read


def make_buffers(runner: Any) -> None:
    """What a later stage receives from the one before it; vLLM makes it in its profile run, and a CPU has none."""
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def end_with_the_others(stage: int, num_stages: int, sign: Path) -> None:
    """From now on this stage ends when another one is gone; a later one renews the file `sign` until then."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    watch = (lambda: give_sign(store, stage, sign)) if stage else Signs(store, num_stages).look
    threading.Thread(target=_watch, args=(watch,), daemon=True, name="StageWatch").start()


class StageGone(Exception):
    """Another stage of this pipeline is gone, or this one is not wanted any more."""


def give_sign(store: Any, stage: int, sign: Path) -> None:
    """Of a later stage: it lives. Raises StageGone where there is no pipeline any more."""
    try:
        store.add(_key(stage), 1)
    except Exception as error:  # however the connection broke
        raise StageGone(f"the first stage is gone ({type(error).__name__})") from error
    try:
        os.utime(sign)
    except OSError as error:
        raise StageGone("its run directory is gone") from error


class Signs:
    """What the first stage has seen of the later ones."""

    def __init__(self, store: Any, num_stages: int, silent_s: float = SILENT_S) -> None:
        self._store, self._silent_s = store, silent_s
        self._seen = dict.fromkeys(range(1, num_stages), (0, time.monotonic()))

    def look(self) -> None:
        """Raises StageGone for one that has given none for too long."""
        for stage, (count, at) in self._seen.items():
            found = self._store.add(_key(stage), 0)
            if found != count:
                self._seen[stage] = (found, time.monotonic())
            elif time.monotonic() - at > self._silent_s:
                raise StageGone(f"stage {stage} has given no sign for {self._silent_s:g} s")


def _key(stage: int) -> str:
    return f"glowplug-stage-{stage}"


def _watch(look: Callable[[], None]) -> None:
    while True:
        try:
            look()
        except StageGone as gone:
            print(f"this stage ends: {gone}", flush=True)
            os.kill(os.getppid(), signal.SIGKILL)  # it may wait for another stage, where no signal interrupts it
            os._exit(1)
        time.sleep(WATCH_S)
