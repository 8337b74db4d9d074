"""Reload a vLLM GPU worker's weights from host memory: `--worker-extension-cls` of that name.

vLLM's sleep of level 1 copies the weights into pinned memory of each engine. If the node holds them anyway, level 2
drops and reloads them from there. Not measured on a GPU."""

from pathlib import Path
from typing import Any

EXTENSION = "ReloadingWorker"


class ReloadingWorker:
    """A base after vLLM's worker's own ones: it adds methods and cannot replace any."""

    model_config: Any
    model_runner: Any
    _glowplug_region: Any = None

    def glowplug_hold_weights(self) -> bool:
        """Return whether the weights can be reloaded from their present files, whose pages stay even if the files are
        deleted."""
        from glowplug_vllm.region import Region

        if self._glowplug_region is None:
            region = Region(Path(self.model_config.model))
            if not region.is_readable or self.model_config.quantization:
                return False
            self._glowplug_region = region
        return True

    def glowplug_reload_weights(self) -> None:
        """Reload the weights after their memory is awake."""
        region, self._glowplug_region = self._glowplug_region, None
        self.model_runner.reload_weights(weights_iterator=region.items())
