"""One stage of a pipeline across nodes: vLLM's pipeline parallelism, each stage with its part of the layers (HydraServe
section 4).

order.json beside the files holds the cut (by bytes, see glowplug/weights/order.py). Stages meet in a store of the
first one's process. A later stage has no server: a file (rendezvous.py) reports its loaded weights, and is renewed
while it lives. A later stage ends with the store, the first one after `SILENT_S` without a sign of a later one. Only
tensors of own layers are read: the rest of the files may be holes."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from glowplug_vllm import arriving, rendezvous
from glowplug_vllm.replaced import replaced

START = "_GLOWPLUG_START"  # environment variable with JSON
PARTITION = "VLLM_PP_LAYER_PARTITION"  # vLLM's: layers of each stage, "4,11,11,4"; unset: its own cut
ORDER_S = 60.0
WATCH_S = 1.0
SILENT_S = 15.0
_CUT = "glowplug-cut"
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_POLL_S = 0.005


def started(run_dir: Path, launched_at: float, imported_at: float, load_began_at: float) -> str:
    phases = [["launch", launched_at, imported_at]]
    return json.dumps({"run_dir": str(run_dir), "phases": phases, "load_began_at": load_began_at})


class BadCut(RuntimeError):
    """The parts of the stages do not make one model."""


def partition(directory: Path, num_stages: int, arrives: bool) -> str:
    """Return PARTITION; "" leaves the cut to vLLM. While weights arrive, wait for it. Raises BadCut, TimeoutError."""
    region, deadline = directory.parent, time.monotonic() + ORDER_S
    while arrives and not (region / "order.json").exists() and not (region / "complete.json").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no order is recorded for the weights of {region.name[:12]} arrive")
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
    """Drop layers behind the last one that the model runs (to predict several tokens). Empty if none are left for the
    last stage."""
    text = config.get("text_config") or config.get("llm_config") or config
    num_layers = next((text[name] for name in _NUM_LAYERS if name in text), None)
    if not counts or num_layers is None or sum(counts) == num_layers:
        return counts
    extra = sum(counts) - num_layers
    return [*counts[:-1], counts[-1] - extra] if 0 < extra < counts[-1] else []


def agree(store: Any, rank: int) -> None:
    """Raises BadCut if a worker has another cut."""
    own = os.environ.get(PARTITION, "")
    if rank == 0:
        store.set(_CUT, own)
    elif (first := store.get(_CUT).decode()) != own:
        raise BadCut(f"the first stage has a model of {first or 'even'} layers, and this one of {own or 'even'}")


def report_loaded(local_rank: int) -> Path:
    start = json.loads(os.environ[START])
    run_dir, name = Path(start["run_dir"]), rendezvous.loaded(local_rank)
    phases = [*start["phases"], ["load", start["load_began_at"], time.time()]]
    rendezvous.write(run_dir, name, {"phases": phases})
    return run_dir / name


@contextlib.contextmanager
def own_tensors(directory: Path) -> Iterator[None]:
    """Let vLLM's loader read only tensors of own layers. For arriving weights it does so itself (arriving_load.py)."""
    if arriving.is_on():
        yield
        return
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    from glowplug_vllm.region import Region

    read = DefaultModelLoader.get_all_weights

    def get_all_weights(loader: Any, config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        region = Region(directory)
        if not region.is_readable:  # a type that only vLLM reads
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


@contextlib.contextmanager
def without_head(is_last: bool) -> Iterator[None]:
    """Let only the last stage pack embeddings for the head, if tied.

    Others only look rows up; packing costs a second copy and a fifth of the load time."""
    if is_last:
        yield
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    with replaced(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda *_: None):
        yield


def make_buffers(runner: Any) -> None:
    """Make the input buffers, which vLLM makes in its profile run; a CPU has none."""
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def end_with_the_others(stage: int, num_stages: int, sign: Path) -> None:
    """End this stage once another is gone; a later stage renews the file `sign` until then."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    watch = (lambda: give_sign(store, stage, sign)) if stage else Signs(store, num_stages).look
    threading.Thread(target=_watch, args=(watch,), daemon=True, name="StageWatch").start()


class StageGone(Exception):
    """Another stage is gone, or this one is no longer wanted."""


def give_sign(store: Any, stage: int, sign: Path) -> None:
    """Raises StageGone without a pipeline."""
    try:
        store.add(_key(stage), 1)
    except Exception as error:
        raise StageGone(f"the first stage is gone ({type(error).__name__})") from error
    try:
        os.utime(sign)
    except OSError as error:
        raise StageGone("its run directory is gone") from error


class Signs:
    def __init__(self, store: Any, num_stages: int, silent_s: float = SILENT_S) -> None:
        self._store, self._silent_s = store, silent_s
        self._seen = dict.fromkeys(range(1, num_stages), (0, time.monotonic()))

    def look(self) -> None:
        """Raises StageGone for a stage silent too long."""
        for stage, (count, at) in self._seen.items():
            found = self._store.add(_key(stage), 0)
            if found != count:
                self._seen[stage] = (found, time.monotonic())
            elif time.monotonic() - at > self._silent_s:
                raise StageGone(f"stage {stage} has been silent for {self._silent_s:g} s")


def _key(stage: int) -> str:
    return f"glowplug-stage-{stage}"


def _watch(look: Callable[[], None]) -> None:
    while True:
        try:
            look()
        except StageGone as gone:
            print(f"this stage ends: {gone}", flush=True)
            os.kill(os.getppid(), signal.SIGKILL)  # signals do not interrupt a wait for another stage
            os._exit(1)
        time.sleep(WATCH_S)
