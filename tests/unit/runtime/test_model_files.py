"""Model files: what a person writes, what is refused, and that the refusal names the field."""

import json
from pathlib import Path

import jsonschema
import pytest

from glowplug.domain.errors import InvalidModelFile
from glowplug.runtime import model_files

GOOD = """
name: Tiny Chat
engine: emulated
weights_bytes: 300MiB
kv_bytes: 64MiB
keep_alive_s: 2m
aliases: [tiny]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return path


def test_sizes_and_durations_are_read(tmp_path):
    (model,) = model_files.load(write(tmp_path, GOOD))
    assert (model.key, model.weights_bytes, model.keep_alive_s) == ("tiny-chat", 300 * 1024**2, 120.0)
    assert model.names == ("Tiny Chat", "tiny")


def test_a_relative_path_is_taken_from_the_file_and_gives_the_size(tmp_path):
    (tmp_path / "w.gguf").write_bytes(b"x" * 1234)
    (model,) = model_files.load(write(tmp_path, "name: a\nengine: llamacpp\nweights: w.gguf\n"))
    assert model.weights.uri == f"file:{tmp_path}/w.gguf"
    assert (model.weights_bytes, model.weights.num_bytes) == (1234, 0), (
        "a size not declared is not held against the file"
    )


def test_declared_bytes_are_held_against_a_file_that_can_be_read(tmp_path):
    (tmp_path / "w.gguf").write_bytes(b"x" * 1234)
    text = "name: a\nengine: llamacpp\nweights: {uri: w.gguf, num_bytes: %d}\n"
    assert model_files.load(write(tmp_path, text % 1234))[0].weights_bytes == 1234
    for wrong in (5, 1235):
        with pytest.raises(
            InvalidModelFile, match=rf"weights.num_bytes: {wrong} is declared, .*w.gguf has 1234"
        ) as found:
            model_files.load(write(tmp_path, text % wrong))
        assert found.value.param == "weights.num_bytes"


def test_hidden_files_of_a_directory_do_not_count(tmp_path):
    (tmp_path / "repo" / ".cache").mkdir(parents=True)
    (tmp_path / "repo" / ".cache" / "lock").write_bytes(b"x" * 50)
    (tmp_path / "repo" / "model.safetensors").write_bytes(b"x" * 100)
    text = "name: a\nengine: vllm\nweights: {uri: repo, num_bytes: 100}\n"
    assert model_files.load(write(tmp_path, text))[0].weights_bytes == 100


def test_the_ledger_is_given_all_of_a_file_that_llamacpp_loads(tmp_path):
    (tmp_path / "w.gguf").write_bytes(b"x" * 1234)
    text = "name: a\nengine: llamacpp\nweights: w.gguf\nweights_bytes: %d\n"
    assert model_files.load(write(tmp_path, text % 2000))[0].weights_bytes == 2000
    with pytest.raises(InvalidModelFile, match="weights_bytes: 5 is less than the 1234 bytes of the file"):
        model_files.load(write(tmp_path, text % 5))
    some_layers = text % 5 + "engine_args: {n_gpu_layers: 3}\n"
    assert model_files.load(write(tmp_path, some_layers))[0].weights_bytes == 5


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (GOOD + "keepalive: 3\n", "keepalive: there is no such key"),
        ("engine: emulated\nweights_bytes: 1\n", "name"),
        (GOOD.replace("emulated", "tensorrt"), "engine"),
        (GOOD.replace("300MiB", "300 parsecs"), "^weights_bytes: not a size"),
        (GOOD.replace("300MiB", "-1"), "weights_bytes"),
        (GOOD.replace("64MiB", ".nan"), "kv_bytes"),
        (GOOD + "max_concurrency: 0\n", "max_concurrency"),
        (GOOD + "min_instances: 3\n", "min_instances"),
        (GOOD + "num_gpus: 0\n", "num_gpus"),
        (GOOD.replace("emulated", "llamacpp") + "weights: http://x/w\nnum_gpus: 2\n", "num_gpus: llamacpp instances"),
        (GOOD.replace("Tiny Chat", "'***'"), "name"),
        (GOOD + "weights: {uri: http://x/w, sha256: abc}\n", "sha256"),
        ("name: a\nengine: llamacpp\nweights: gone.gguf\n", "gone.gguf"),
        ("name: a\nengine: llamacpp\nweights: http://x/w\n", "weights_bytes"),
        ("name: a\nengine: llamacpp\nweights_bytes: 5\n", "weights"),
        ("name: a\nengine: llamacpp\nweights: 'sample:gpt9'\n", "gpt9"),
        ("- 1\n- 2\n", "mapping"),
        ("", "no model"),
        ("a: 1\nb: [unclosed\n", "line 3: expected"),
        (GOOD + "---" + GOOD, "twice"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path, text, names):
    with pytest.raises(InvalidModelFile, match=names.replace("*", r"\*")):
        model_files.load(write(tmp_path, text))


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(InvalidModelFile):
        model_files.load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InvalidModelFile):
        model_files.load(tmp_path / "b.yaml")


def test_the_published_schema_is_current_and_accepts_what_the_loader_accepts():
    published = json.loads(Path("deploy/models/model.schema.json").read_text())
    assert published == model_files.json_schema()
    jsonschema.validate({"name": "a", "engine": "vllm", "weights": "x", "kv_bytes": "1GiB"}, published)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "a", "engine": "vllm", "colour": "red"}, published)
