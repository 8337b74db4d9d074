"""`glowplug node`, and the Slurm script."""

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug.cli import node
from glowplug.cli.terminal import CliError
from tests.house.tree import ROOT


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def a_file(folder: Path, mode: int = 0o600, **values: str) -> Path:
    path = folder / "node.env"
    path.write_text("".join(f"export {name}='{value}'\n" for name, value in values.items()))
    path.chmod(mode)
    return path


def test_it_says_what_a_firewall_stops(tmp_path: Path, listener: str) -> None:
    closed = "127.0.0.1:1"
    told = {
        "GLOWPLUG_NATS_URL": f"nats://agent:p@{closed},nats://agent:p@{listener}",
        "GLOWPLUG_REDIS_URL": f"redis+sentinel://agent:p%40@{closed},{closed}/main",
    }
    with pytest.raises(CliError, match=r"^the store cannot be reached from here \(127.0.0.1:1: .*refused\): is it up"):
        node.node("node-9", env_file=a_file(tmp_path, **told), folder=tmp_path / "own")
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("name", "mode", "values", "why"),
    [
        ("Node 9", 0o600, {}, "'Node 9' is not a node name"),
        ("node-9", 0o644, {"GLOWPLUG_NATS_URL": "nats://a:1"}, "others can read"),
        ("node-9", 0o600, {"GLOWPLUG_NATS_URL": "nats://a:1"}, "GLOWPLUG_REDIS_URL are not known"),
    ],
)
def test_it_refuses_what_cannot_work(tmp_path: Path, name: str, mode: int, values: dict[str, str], why: str) -> None:
    with pytest.raises(CliError, match=why):
        node.node(name, env_file=a_file(tmp_path, mode, **values))


def test_a_socket_is_on_this_machine() -> None:
    assert list(node._unreachable({"GLOWPLUG_NATS_URL": "nats://", "GLOWPLUG_REDIS_URL": "unix:///run/none"})) == []


def test_slurm_names_each_node_after_its_machine(tmp_path: Path) -> None:
    """With stand-ins for `srun` and `glowplug`."""
    for name, text in (("srun", 'shift; exec "$@"'), ("glowplug", 'echo "$GLOWPLUG_GPU_KIND $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/h", "TMPDIR": "/tmp"}
    env |= {"SLURMD_NODENAME": "GPU_07.rack", "SLURM_JOB_ID": "5"}
    script = ["bash", str(ROOT / "deploy/slurm/nodes.sbatch")]
    said = subprocess.run(script, env=env, capture_output=True, text=True, check=True).stdout
    assert said == (
        "cuda node gpu-07-rack --env-file /h/.glowplug/node.env --advertise GPU_07.rack --folder /tmp/glowplug-5\n"
    )
