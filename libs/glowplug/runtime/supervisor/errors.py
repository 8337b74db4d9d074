"""What keeps a fleet from starting or running: one line each, which names what to change."""


class FleetError(RuntimeError):
    """The fleet cannot start or run. `exit_code` is what the command ends with."""

    exit_code = 1


class AlreadyRunning(FleetError):
    """Another fleet holds the state directory."""

    exit_code = 4


class PortInUse(FleetError):
    """A port the fleet needs is taken."""

    exit_code = 4


class NotInstalled(FleetError):
    """A program the fleet needs is missing or too old."""


class WrongSetting(FleetError):
    """A setting is out of its range."""

    exit_code = 2
