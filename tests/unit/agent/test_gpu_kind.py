"""What a node's GPUs are called: emulated exactly where no real engine could be granted their bytes."""

from glowplug.engines import drivers
from services.agent.handlers import gpu_kind
from services.agent.settings import AgentSettings


def test_budgets_are_emulated_where_only_emulated_engines_can_have_them() -> None:
    settings = AgentSettings().engine_settings()
    emulated, real = drivers.driver("emulated", settings), drivers.driver("llamacpp", settings)
    assert gpu_kind("host", {"emulated": emulated}) == "emulated"
    assert gpu_kind("host", {"emulated": emulated, "llamacpp": real}) == "host"
    assert gpu_kind("host", {}) == "host", "a node without engines emulates nothing"
    assert gpu_kind("cuda", {"emulated": emulated}) == "cuda", "devices that were read are devices"
