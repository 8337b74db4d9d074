"""Errors that keep a fleet from starting: one line each, naming the remedy."""


class CannotStart(RuntimeError):
    """`exit_code`: of the command."""

    exit_code = 1


class AlreadyRunning(CannotStart):
    """Another fleet holds the state directory."""

    exit_code = 4


class PortInUse(CannotStart):
    exit_code = 4


class NotInstalled(CannotStart):
    """A program is missing or too old."""


class WrongSetting(CannotStart):
    """One line that names the variable: `GLOWPLUG_PORT: 'abc' is not a whole number`."""

    exit_code = 2
