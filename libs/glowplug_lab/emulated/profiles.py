"""Models and GPUs that can be emulated, and the stages of a start."""

from dataclasses import dataclass

from glowplug_lab.simulator.costs import FITTED, StepCosts


@dataclass(frozen=True, slots=True)
class Profile:
    costs: StepCosts
    kv_bytes_per_token: int
    activation_bytes: int  # per token, between two layers


_BYTES = {  # per token, 16 bit: KV cache and hidden size
    "llama-2-7b": (512 << 10, 2 * 4096),  # multi-head attention
    "llama-2-13b": (800 << 10, 2 * 5120),
    "qwen2.5-7b": (56 << 10, 2 * 3584),  # grouped-query: 28 layers x 4 KV heads x 128 x K and V
}
PROFILES = {f"{model}/{gpu}": Profile(costs, *_BYTES[model]) for (model, gpu), costs in FITTED.items()}

DEFAULT_PROFILE = "llama-2-7b/a10"
CHUNK_BYTES = 16e6  # HydraServe Eq. 5's last chunk (erratum E15)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """Stages of a start, before `time_scale`. Sources: HydraServe (about 2 s of launch left after overlap),
    SwapServeLLM (7 to 13.5 GB/s measured from host memory to a GPU)."""

    launch_s: float = 2.0
    fetch_bytes_per_s: float = 0.0  # modelled network, for models without a weight file; 0: already in host memory
    load_bytes_per_s: float = 10e9
    warmup_s: float = 0.5
