"""Step costs: least-squares fits over published profile files (Aegaeon), 2-11 % mean error.

Departures: the fits are of pure prefill and pure decode steps. A mixed step (chunked prefill) is charged the larger
constant once, plus both variable parts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds. tok: prompt tokens in the step; sq: sum of squared prompt lengths; ctx: sum of context lengths."""

    prefill_ms: float
    prefill_ms_per_tok: float
    prefill_ms_per_sq: float
    decode_ms: float
    decode_ms_per_seq: float
    decode_ms_per_ctx: float
    kv_bytes_per_token: int
    activation_bytes: int  # per token, between two layers

    def step_s(self, *, tok: int, sq: int, num_decoding: int, ctx: int) -> float:
        constant = max(self.prefill_ms if tok else 0.0, self.decode_ms if num_decoding else 0.0)
        prefill = self.prefill_ms_per_tok * tok + self.prefill_ms_per_sq * sq
        decode = self.decode_ms_per_seq * num_decoding + self.decode_ms_per_ctx * ctx
        return (constant + prefill + decode) / 1000.0


_KV_7B, _KV_13B = 512 << 10, 800 << 10  # multi-head attention, 16 bit
_HIDDEN_7B, _HIDDEN_13B, _HIDDEN_QWEN_7B = 2 * 4096, 2 * 5120, 2 * 3584  # hidden size, 16 bit
_KV_QWEN_7B = 56 << 10  # grouped-query: 28 layers x 4 KV heads x 128 x K and V x 2 bytes

PROFILES = {  # prefill: constant, per tok, per sq; decode: constant, per sequence, per ctx; KV and activation bytes
    "llama-2-7b/a10": Profile(17.5, 0.1968, 5.2e-6, 32.1, 0.231, 1.04e-3, _KV_7B, _HIDDEN_7B),
    "llama-2-7b/a100": Profile(7.5, 0.0686, 1.1e-6, 11.8, 0.154, 4.6e-4, _KV_7B, _HIDDEN_7B),
    "llama-2-7b/h800": Profile(7.3, 0.0207, 0.0, 9.1, 0.110, 0.0, _KV_7B, _HIDDEN_7B),
    "llama-2-13b/a100": Profile(15.4, 0.1193, 0.0, 20.4, 0.196, 3.0e-4, _KV_13B, _HIDDEN_13B),
    "llama-2-13b/h100": Profile(8.6, 0.0380, 0.0, 12.9, 0.096, 0.0, _KV_13B, _HIDDEN_13B),
    "qwen2.5-7b/a10": Profile(19.1, 0.2016, 8.9e-6, 33.9, 0.160, 0.0, _KV_QWEN_7B, _HIDDEN_QWEN_7B),
    "qwen2.5-7b/a100": Profile(8.2, 0.0570, 0.0, 12.2, 0.117, 3.3e-4, _KV_QWEN_7B, _HIDDEN_QWEN_7B),
    "qwen2.5-7b/h100": Profile(6.7, 0.0199, 0.0, 9.1, 0.071, 0.0, _KV_QWEN_7B, _HIDDEN_QWEN_7B),
}

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
