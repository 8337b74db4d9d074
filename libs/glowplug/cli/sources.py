"""Access of commands to sources of weights, with a prefetcher's settings from the environment."""

from glowplug.cli.terminal import CliError
from glowplug.runtime.errors import WrongSetting
from glowplug.runtime.settings import SourceSettings
from glowplug.weights.measure import measured
from glowplug.weights.source import SourceInfo, SourceOptions


def source_options() -> SourceOptions:
    """Raises CliError for a wrong setting."""
    try:
        return SourceSettings.read().source_options()
    except WrongSetting as error:
        raise CliError(str(error)) from error


def measure(uri: str) -> SourceInfo:
    """Raises WeightsUnavailable and NoAnswer."""
    return measured(uri, source_options())
