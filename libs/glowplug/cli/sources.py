"""Access of commands to sources of weights, with a prefetcher's settings from the environment."""

from pydantic import ValidationError

from glowplug.cli.terminal import CliError
from glowplug.runtime.settings import SourceSettings, explain
from glowplug.weights.measure import measured
from glowplug.weights.source import SourceInfo, SourceOptions


def source_options() -> SourceOptions:
    """Raises CliError for a wrong setting."""
    try:
        return SourceSettings().source_options()
    except ValidationError as error:
        raise CliError(explain(error)) from error


def measure(uri: str) -> SourceInfo:
    """Raises WeightsUnavailable and NoAnswer."""
    return measured(uri, source_options())
