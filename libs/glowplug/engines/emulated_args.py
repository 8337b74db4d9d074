"""What the emulated engine takes and reads, as the driver declares it."""

from pathlib import Path
from typing import Any

from glowplug.engines.declaration import Argument, EngineArguments, EngineWeights, WeightsForm, choice, number, whole
from glowplug.engines.emulated_host.faults import Faults, changed
from glowplug.engines.emulated_host.profiles import PROFILES

_MOST_S = 86_400.0  # a modelled stage of more than a day never ends for those who wait for it
_MOST_RATE = 1e15  # bytes per second, far above any memory
_MOST_SCALE = 1e6


def _wrong_faults(value: Any) -> str | None:
    try:
        changed(Faults(), value)
    except ValueError as error:
        return str(error)
    return None


ARGUMENTS = EngineArguments(
    engine="the emulated engine",
    known={
        "profile": choice("the model and GPU whose timing is modelled", tuple(PROFILES)),
        "time_scale": number("emulated seconds per second", _MOST_SCALE, above_zero=True),
        "launch_s": number("seconds until the process has started", _MOST_S),
        "warmup_s": number("seconds of warm-up", _MOST_S),
        "load_bytes_per_s": number("host memory to GPU", _MOST_RATE, above_zero=True),
        "fetch_bytes_per_s": number("a modelled network in front of it; 0 for none", _MOST_RATE),
        "hop_s": number("from one stage of a pipeline to the next, beside what the connection takes", _MOST_S),
        "stage_timeout_s": number("real seconds until a stage that does not answer is lost", _MOST_S, above_zero=True),
        "max_num_batched_tokens": whole("tokens of one step", least=1),
        "seed": whole("of texts and chances"),
        "faults": Argument(
            meaning="what goes wrong from the start",
            allowed="a mapping with the options of /admin/config",
            wrong=_wrong_faults,
        ),
    },
)


def unreadable(path: Path) -> str:
    """'' for anything but an empty file. Raises OSError."""
    return f"{path.name} is empty" if path.is_file() and not path.stat().st_size else ""


WEIGHTS = EngineWeights(
    kind="any file or directory, whose bytes it moves and does not read",
    form=WeightsForm.ANY,
    required=False,
    unreadable=unreadable,
)
