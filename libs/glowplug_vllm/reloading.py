"""What vLLM's GPU worker gets besides: its weights again from host memory, `--worker-extension-cls` of that name.

vLLM's sleep of level 1 copies the weights into pinned memory of the engine's own. Where the node holds them in host
memory anyway, level 2 drops them, and they are loaded again from there: one copy for the node instead of one for each
engine that sleeps. Not measured on a GPU.
"""

from pathlib import Path
from typing import Any

EXTENSION = "ReloadingWorker"


class ReloadingWorker:
    """Mixed into vLLM's worker, after its own bases: it adds methods and cannot replace any."""

    model_config: Any
    model_runner: Any
    _glowplug_region: Any = None

    def glowplug_hold_weights(self) -> bool:
        """Whether the weights can be loaded again from their files as they lie there now. Their pages stay from here
        on, whoever deletes the files."""
        from glowplug_vllm.region import Region

        if self._glowplug_region is None:
            region = Region(Path(self.model_config.model))
            if not region.is_readable or self.model_config.quantization:
                return False
            self._glowplug_region = region
        return True

    def glowplug_reload_weights(self) -> None:
        """Load them again, after a wake of the memory they lie in."""
        region, self._glowplug_region = self._glowplug_region, None
        self.model_runner.reload_weights(weights_iterator=region.items())
