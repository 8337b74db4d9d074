"""Hot reload of model files: a bad file keeps the old models and gives a reason."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.reads import READS
from glowplug.domain.model import Model
from glowplug.policies.scaling.baselines import reactive as scale
from glowplug.runtime.shell import Shell
from glowplug.services.autoscaler import file_watch
from glowplug.services.autoscaler.model_watch import ModelWatch
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.weights.files import NoAnswer, PatientReader
from glowplug.weights.source import SourceFile, SourceInfo
from tests.waiting import WAIT_S

TWO = "---\nname: two\nengine: emulated\nweights_bytes: 10MiB\n"
ALIASED = "name: other\naliases: [one]\nengine: emulated\nweights_bytes: 1MiB\n"


def one(keep_alive_s: float | str = 5) -> str:
    return f"name: one\nengine: emulated\nweights_bytes: 10MiB\nkeep_alive_s: {keep_alive_s}\n"


class Watched:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, MemoryStore()
        self.watch = ModelWatch(folder, 1.0)
        self.controller = AutoscalerController(scale, "reactive", epoch=1)
        means = (MemoryBus(), self.store)
        metrics = ShellMetrics("autoscaler", CollectorRegistry())
        self.shell = Shell("autoscaler", "autoscaler-1", self.controller, *means, metrics, reads=READS)

    async def poll(self, **files: str | None) -> None:
        """Write these files (None removes one), then look once."""
        for name, text in files.items():
            path = self.folder / f"{name}.yaml"
            path.unlink() if text is None else path.write_text(text)
        await self.watch.poll(self.shell)

    @property
    def models(self) -> Mapping[str, Model]:
        return self.controller.models

    @property
    def errors(self) -> dict[str, str]:
        return {Path(path).name: reason for path, reason in self.watch.errors.items()}


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Watched]:
    folder = tmp_path / "models"
    folder.mkdir()
    made = Watched(folder)
    await made.shell.start()
    yield made
    await made.shell.stop()


async def test_files_are_deployed_changed_and_undeployed(at: Watched) -> None:
    await at.poll(a=one() + TWO)
    assert set(at.models) == set(at.store.tables["models"]) == {"one", "two"}
    await at.poll(a=one(77))
    assert set(at.models) == {"one"} and at.models["one"].keep_alive_s == 77
    await at.poll(a=None)
    assert at.models == {} and at.errors == {}


async def test_a_bad_file_keeps_the_old_model_and_shows_the_reason(at: Watched) -> None:
    await at.poll(a=one(5))
    await at.poll(a=one("soon"))
    assert at.models["one"].keep_alive_s == 5 and "keep_alive_s" in at.errors["a.yaml"]
    await at.poll(a=one(6))
    assert at.models["one"].keep_alive_s == 6 and at.errors == {}


async def test_a_source_that_does_not_answer_keeps_a_model_out_until_it_does(at: Watched) -> None:
    answers: list[SourceInfo] = []

    def measure(uri: str) -> SourceInfo:
        if not answers:
            raise NoAnswer(0, f"{uri}: no answer")
        return answers[0]

    at.watch.measure = measure
    await at.poll(a="name: one\nengine: llamacpp\nweights: hf:o/n\n")
    assert at.models == {} and "hf:o/n: no answer" in at.errors["a.yaml"]
    answers.append(SourceInfo(files=(SourceFile(path="", num_bytes=1234),), ranges=True))
    await at.poll()
    assert at.models["one"].weights_bytes == 1234 and at.errors == {}


async def test_a_size_that_was_answered_is_not_asked_again_while_others_are_not(at: Watched) -> None:
    asked = list[str]()

    def measure(uri: str) -> SourceInfo:
        asked.append(uri)
        if uri == "hf:o/b" and asked.count(uri) == 1:
            raise NoAnswer(0, f"{uri}: no answer")
        return SourceInfo(files=(SourceFile(path="", num_bytes=1234),), ranges=True)

    at.watch.measure = measure
    await at.poll(a="---\n".join(f"name: {name}\nengine: llamacpp\nweights: hf:o/{name}\n" for name in "ab"))
    await at.poll()
    assert asked == ["hf:o/a", "hf:o/b", "hf:o/b"] and set(at.models) == {"a", "b"}


async def test_two_files_that_claim_one_name_conflict_and_the_first_stays(at: Watched) -> None:
    await at.poll(a=one(), b=ALIASED)
    assert set(at.models) == {"one"} and "belongs to model 'one'" in at.errors["b.yaml"]
    await at.poll(a=None)
    await at.poll()
    assert set(at.models) == {"other"} and at.errors == {}


async def test_a_second_file_of_a_model_is_kept_out_and_its_removal_takes_nothing_along(at: Watched) -> None:
    await at.poll(a=one(5), b=one(9))
    assert at.models["one"].keep_alive_s == 5 and "comes from a.yaml already" in at.errors["b.yaml"]
    await at.poll(b=None)
    assert set(at.models) == {"one"} and at.errors == {}


async def test_a_renamed_file_keeps_its_model_and_a_copy_takes_over_from_a_removed_one(at: Watched) -> None:
    await at.poll(a=one(5))
    (at.folder / "a.yaml").rename(at.folder / "b.yaml")
    await at.poll()
    assert at.models["one"].source == str(at.folder / "b.yaml")
    await at.poll(c=one(9))
    await at.poll(b=None)
    assert at.models["one"].keep_alive_s == 9 and at.errors == {}


async def test_models_of_a_file_removed_while_nobody_watched_are_undeployed(at: Watched) -> None:
    await at.poll(a=one())
    at.watch = ModelWatch(at.folder, 1.0)
    await at.poll(a=None)
    assert at.models == {}


async def test_an_unreadable_directory_changes_nothing(at: Watched) -> None:
    await at.poll(a=one())
    at.folder.rename(at.folder.with_name("elsewhere"))
    await at.poll()
    assert set(at.models) == {"one"} and "cannot read" in at.errors["models"]


async def test_a_name_becomes_an_alias_in_one_look(at: Watched) -> None:
    await at.poll(a=one())
    await at.poll(a=ALIASED)
    assert {key: model.aliases for key, model in at.models.items()} == {"other": ("one",)} and not at.errors


async def test_names_change_files_in_one_look(at: Watched) -> None:
    """Whichever file is read first: a model and its name move, aliases are exchanged, whole files are."""
    await at.poll(a=one() + "aliases: [x]\n", b=TWO + "aliases: [y]\n")
    await at.poll(a=one() + "aliases: [y]\n", b=TWO + "aliases: [x]\n")
    assert {key: model.aliases for key, model in at.models.items()} == {"one": ("y",), "two": ("x",)}
    await at.poll(a=TWO, b=one(7))
    assert {key: Path(model.source).name for key, model in at.models.items()} == {"two": "a.yaml", "one": "b.yaml"}
    assert at.models["one"].keep_alive_s == 7 and not at.errors
    await at.poll(a=ALIASED, b=TWO)
    assert {key: model.aliases for key, model in at.models.items()} == {"other": ("one",), "two": ()}
    await at.poll(a=None, c=ALIASED)
    assert at.models["other"].source.endswith("c.yaml") and not at.errors


async def test_a_base_goes_with_its_adapters_in_one_look(at: Watched) -> None:
    at.watch.measure = lambda uri: SourceInfo(files=(SourceFile(path="", num_bytes=1234),), ranges=True)
    adapter = "---\nname: its-adapter\nbase: two\nadapter: hf:o/n\n"
    await at.poll(a=TWO + adapter, b=one())
    assert set(at.models) == {"one", "two", "its-adapter"}
    await at.poll(a=ALIASED, b=None)
    assert set(at.models) == {"other"} and at.models["other"].aliases == ("one",) and not at.errors


async def test_a_link_to_nowhere_is_named_hidden_ones_are_not_and_the_others_are_in_force(at: Watched) -> None:
    for name in (".#b.yaml", "a.yaml"):  # the first is an editor's lock
        (at.folder / name).symlink_to("user@host.1:1")
    await at.poll(b=one())
    assert set(at.models) == {"one"} and set(at.errors) == {"a.yaml"} and "No such file" in at.errors["a.yaml"]


async def test_a_pipe_among_the_model_files_is_named_and_the_others_are_in_force(at: Watched) -> None:
    os.mkfifo(at.folder / "a.yaml")
    async with asyncio.timeout(WAIT_S):
        await at.poll(b=one())
    assert set(at.models) == {"one"} and at.errors == {"a.yaml": "cannot be read: it is not a regular file"}


class DeadMount(type(Path())):  # type: ignore[misc]
    """File a.yaml does not answer while `dead` is clear."""

    answers = threading.Event()

    def stat(self, **options):
        if self.name == "a.yaml":
            self.answers.wait()
        return super().stat(**options)


async def test_a_mount_that_dies_keeps_its_models_in_force_and_holds_up_nothing_else(at: Watched) -> None:
    folder = DeadMount(at.folder)
    folder.answers.set()
    at.watch = ModelWatch(folder, 1.0, timeout_s=0.05)
    await at.poll(a=one(5))
    assert set(at.models) == {"one"}
    folder.answers.clear()
    await at.poll(b=TWO)
    await at.poll()
    await at.poll()
    assert set(at.models) == {"one", "two"} and "the file system has not answered" in at.errors["a.yaml"]
    folder.answers.set()
    await at.poll(a=one(77))
    async with asyncio.timeout(WAIT_S):
        while at.errors:
            await at.poll()
    assert at.models["one"].keep_alive_s == 77


async def test_a_file_that_its_reader_did_not_think_of_is_refused_and_the_others_come_in_force(at: Watched) -> None:
    """264 bytes of a GGUF whose alignment is a text."""
    weights = at.folder / "odd.gguf"
    key, value = b"general.alignment", b"abc"
    pair = len(key).to_bytes(8, "little") + key + (8).to_bytes(4, "little") + len(value).to_bytes(8, "little") + value
    tensor = (1).to_bytes(8, "little") + b"t" + bytes(4) + bytes(4) + bytes(8)
    head = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + (1).to_bytes(8, "little")
    weights.write_bytes((head + pair + tensor).ljust(264, b"\0"))
    odd = f"name: odd\nengine: llamacpp\nweights: {weights}\n"
    await at.poll(aaa=odd, zzz=TWO)
    assert set(at.models) == {"two"}
    assert "general.alignment is 'abc'" in at.errors["aaa.yaml"]


async def test_an_error_nobody_thought_of_keeps_one_file_out(at: Watched) -> None:

    def measure(uri: str) -> SourceInfo | None:
        raise ZeroDivisionError("of a reader")

    at.watch.measure = measure
    await at.poll(aaa="name: far\nengine: llamacpp\nweights: http://127.0.0.1:9/m.gguf\n", zzz=TWO)
    assert set(at.models) == {"two"}
    assert at.errors["aaa.yaml"] == "cannot be read: ZeroDivisionError: of a reader"


async def test_a_file_kept_out_is_read_anew_after_a_while_though_it_has_not_changed(
    at: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause can be outside the file: here its weights arrive later."""
    weights = at.folder / "late.gguf"
    await at.poll(late=f"name: late\nengine: emulated\nweights: {weights}\n")
    assert not at.models and "cannot read" in at.errors["late.yaml"]
    weights.write_bytes(bytes(1000))
    await at.poll()
    assert not at.models, "it waits for a while, or for a change of the file"
    monkeypatch.setattr(file_watch, "AGAIN_S", 0.0)
    await at.poll(late=f"name: late\nengine: emulated\nweights: {weights}.none\n")
    weights.rename(f"{weights}.none")
    await at.poll()
    assert set(at.models) == {"late"} and not at.errors


async def test_a_reading_that_ends_as_its_time_is_up_counts() -> None:
    """A blocked loop sees the answer and the timeout in one turn."""
    begun = threading.Event()

    def work() -> int:
        begun.set()
        return 7

    def hold_up_the_loop() -> None:
        begun.wait(WAIT_S)
        time.sleep(0.2)

    asyncio.get_running_loop().call_soon(hold_up_the_loop)  # once `run` waits
    assert await PatientReader(0.1).run("slow", work) == 7
