"""How commands ask the sources of weights: as the environment says, like a prefetcher of this machine."""

from pydantic import ValidationError

from glowplug.cli.terminal import CliError
from glowplug.runtime.settings import SourceSettings, explain
from glowplug.weights.measure import measured
from glowplug.weights.source import SourceInfo, SourceOptions


def source_options() -> SourceOptions:
    """Raises CliError naming a setting that is wrong."""
    try:
        return SourceSettings().source_options()
    except ValidationError as error:
        raise CliError(explain(error)) from error


def measure(uri: str) -> SourceInfo:
    """What the source of `uri` holds. Raises WeightsUnavailable and NoAnswer."""
    return measured(uri, source_options())
