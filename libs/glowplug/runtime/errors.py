"""Define the errors of a fleet: one line each, naming the remedy."""


class FleetError(RuntimeError):
    """`exit_code`: of the command."""

    exit_code = 1


class AlreadyRunning(FleetError):
    """Another fleet holds the state directory."""

    exit_code = 4


class PortInUse(FleetError):
    exit_code = 4


class NotInstalled(FleetError):
    """A program is missing or too old."""


class WrongSetting(FleetError):
    """One line that names the variable: `GLOWPLUG_PORT: 'abc' is not a whole number`."""

    exit_code = 2
