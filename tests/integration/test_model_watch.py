"""Model files in force: hot reload, a bad file keeps the old models and says why, a removed file undeploys."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.reads import READS
from glowplug.domain.model import Model
from glowplug.policies.scaling.baselines import reactive as scale
from glowplug.runtime.shell import Shell
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.telemetry.tracing import Tracing
from services.autoscaler.model_watch import ModelWatch

ONE = "name: one\nengine: emulated\nweights_bytes: 10MiB\nkeep_alive_s: {keep}\n"
TWO = "---\nname: two\nengine: emulated\nweights_bytes: 10MiB\n"


@pytest.fixture
async def shell():
    metrics = ShellMetrics("autoscaler", CollectorRegistry())
    made = Shell(
        "autoscaler",
        "autoscaler-1",
        AutoscalerController(scale, "reactive", epoch=1),
        MemoryBus(),
        MemoryStore(),
        Tracing("autoscaler", "autoscaler-1"),
        metrics,
        reads=READS,
    )
    await made.start()
    yield made
    await made.stop()


def models(shell: Shell) -> dict[str, Model]:
    assert isinstance(shell.controller, AutoscalerController)
    return shell.controller.models


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def test_files_are_deployed_changed_and_undeployed(shell, tmp_path):
    watch, path = ModelWatch(tmp_path, 1.0), tmp_path / "a.yaml"
    write(path, ONE.format(keep=5) + TWO)
    await watch.poll(shell)
    assert set(models(shell)) == {"one", "two"}
    assert set(shell.store.tables["models"]) == {"one", "two"}
    write(path, ONE.format(keep=77))
    await watch.poll(shell)
    assert set(models(shell)) == {"one"} and models(shell)["one"].keep_alive_s == 77
    path.unlink()
    await watch.poll(shell)
    assert models(shell) == {} and watch.errors == {}


async def test_a_bad_file_keeps_the_old_model_and_shows_the_reason(shell, tmp_path):
    watch, path = ModelWatch(tmp_path, 1.0), tmp_path / "a.yaml"
    write(path, ONE.format(keep=5))
    await watch.poll(shell)
    write(path, ONE.format(keep="soon"))
    await watch.poll(shell)
    assert models(shell)["one"].keep_alive_s == 5
    assert "keep_alive_s" in watch.errors[str(path)]
    write(path, ONE.format(keep=6))
    await watch.poll(shell)
    assert models(shell)["one"].keep_alive_s == 6 and watch.errors == {}


async def test_two_files_that_claim_one_name_conflict_and_the_first_stays(shell, tmp_path):
    watch = ModelWatch(tmp_path, 1.0)
    write(tmp_path / "a.yaml", ONE.format(keep=5))
    write(tmp_path / "b.yaml", "name: other\naliases: [one]\nengine: emulated\nweights_bytes: 1MiB\n")
    await watch.poll(shell)
    assert set(models(shell)) == {"one"}
    assert "belongs to model 'one'" in watch.errors[str(tmp_path / "b.yaml")]
    (tmp_path / "a.yaml").unlink()
    await watch.poll(shell)
    await watch.poll(shell)
    assert set(models(shell)) == {"other"} and watch.errors == {}


async def test_a_second_file_of_a_model_is_kept_out_and_its_removal_takes_nothing_along(shell, tmp_path):
    watch, copy = ModelWatch(tmp_path, 1.0), tmp_path / "b.yaml"
    write(tmp_path / "a.yaml", ONE.format(keep=5))
    write(copy, ONE.format(keep=9))
    await watch.poll(shell)
    assert models(shell)["one"].keep_alive_s == 5
    assert "comes from a.yaml already" in watch.errors[str(copy)]
    copy.unlink()
    await watch.poll(shell)
    assert set(models(shell)) == {"one"} and watch.errors == {}


async def test_a_renamed_file_keeps_its_model_and_a_copy_takes_over_from_a_removed_one(shell, tmp_path):
    watch, path = ModelWatch(tmp_path, 1.0), tmp_path / "a.yaml"
    write(path, ONE.format(keep=5))
    await watch.poll(shell)
    path.rename(tmp_path / "b.yaml")
    await watch.poll(shell)
    assert models(shell)["one"].source == str(tmp_path / "b.yaml")
    write(tmp_path / "c.yaml", ONE.format(keep=9))
    await watch.poll(shell)
    (tmp_path / "b.yaml").unlink()
    await watch.poll(shell)
    assert models(shell)["one"].keep_alive_s == 9 and watch.errors == {}


async def test_models_of_a_file_removed_while_nobody_watched_are_undeployed(shell, tmp_path):
    path = tmp_path / "a.yaml"
    write(path, ONE.format(keep=5))
    await ModelWatch(tmp_path, 1.0).poll(shell)
    path.unlink()
    await ModelWatch(tmp_path, 1.0).poll(shell)
    assert models(shell) == {}


async def test_an_unreadable_directory_changes_nothing(shell, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    write(folder / "a.yaml", ONE.format(keep=5))
    watch = ModelWatch(folder, 1.0)
    await watch.poll(shell)
    folder.rename(tmp_path / "elsewhere")
    await watch.poll(shell)
    assert set(models(shell)) == {"one"}
    assert "cannot read" in watch.errors[str(folder)]


async def test_a_pipe_among_the_model_files_is_named_and_the_others_are_in_force(shell, tmp_path):
    watch = ModelWatch(tmp_path, 1.0)
    os.mkfifo(tmp_path / "a.yaml")
    write(tmp_path / "b.yaml", ONE.format(keep=5))
    async with asyncio.timeout(20):
        await watch.poll(shell)
    assert set(models(shell)) == {"one"}
    assert watch.errors == {str(tmp_path / "a.yaml"): "cannot be read: it is no regular file"}


class DeadMount(type(Path())):  # type: ignore[misc]
    """A directory whose file a.yaml is on a mount that does not answer while `dead` is clear."""

    answers = threading.Event()

    def stat(self, **options):
        if self.name == "a.yaml":
            self.answers.wait()
        return super().stat(**options)


async def test_a_mount_that_dies_keeps_its_models_in_force_and_holds_up_nothing_else(shell, tmp_path):
    folder = DeadMount(tmp_path)
    folder.answers.set()
    watch = ModelWatch(folder, 1.0, timeout_s=0.05)
    write(tmp_path / "a.yaml", ONE.format(keep=5))
    await watch.poll(shell)
    assert set(models(shell)) == {"one"}
    folder.answers.clear()
    write(tmp_path / "b.yaml", TWO)
    for _ in range(3):
        await watch.poll(shell)
    assert set(models(shell)) == {"one", "two"}
    assert "the file system has not answered" in watch.errors[str(tmp_path / "a.yaml")]
    folder.answers.set()
    write(tmp_path / "a.yaml", ONE.format(keep=77))
    async with asyncio.timeout(20):
        while watch.errors:
            await watch.poll(shell)
    assert models(shell)["one"].keep_alive_s == 77
