"""The settings of every service, checked before the first process starts: a wrong one is one line, not a crash loop."""

import importlib

from pydantic import ValidationError

from glowplug.runtime.settings import ServiceSettings, explain
from glowplug.runtime.supervisor.errors import WrongSetting

SERVICES = ("router", "autoscaler", "placer", "predictor", "prefetcher", "agent", "console")
# What each process is given by the plan, so that the environment of `glowplug up` has no say in it.
_GIVEN = {"port": 0, "data_port": 0, "service_id": "", "node_id": "node-1", "advertise_host": "", "engine_ports": ""}


def check_services() -> None:
    """Raises WrongSetting naming the variable, what is wrong with it and what there is."""
    for service in SERVICES:
        # By name: the supervisor starts services and imports none of them.
        module = importlib.import_module(f"services.{service}.settings")
        made = getattr(module, f"{service.capitalize()}Settings")
        assert issubclass(made, ServiceSettings)
        try:
            made(**{name: value for name, value in _GIVEN.items() if name in made.model_fields})
        except ValidationError as error:
            raise WrongSetting(explain(error)) from error
