"""Whatever an instance is called, its files stay in their folder."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.agent.executor import EngineExecutor, file_name
from services.agent.settings import AgentSettings
from services.agent.state_file import StateFile

ODD = ("", ".", "..", "/", "/etc", "../../x", "a/b", "a\\b", "\x00", "x" * 5000, "é", "\udc80", ".hidden", "a\nb", " ")


@given(st.text(st.characters(codec=None)) | st.sampled_from(ODD))
def test_a_name_is_one_name(given: str) -> None:
    name = file_name(given)
    assert Path("/folder", name).parent == Path("/folder") and Path(name).name == name
    assert len(name.encode()) <= 128 and not name.startswith(".") and name.isprintable()


def test_names_that_the_control_plane_gives_stay_and_others_differ() -> None:
    for name in ("m-1x9-1", "i-1.2", "smol-chat-kx3f-2"):
        assert file_name(name) == name
    assert len({file_name(name) for name in ODD}) == len(ODD)


@pytest.mark.parametrize("instance_id", ODD)
def test_engines_keep_to_their_node(tmp_path: Path, instance_id: str) -> None:
    settings = AgentSettings(node_id="n", state_dir=tmp_path, shm_dir=tmp_path / "shm")
    engines = EngineExecutor(settings, {}, StateFile(tmp_path / "agent.json"))
    assert engines.run_dir(instance_id).resolve().parent == (settings.node_dir / "run").resolve()
    assert engines.log_path(instance_id).resolve().parent == (settings.node_dir / "logs").resolve()
