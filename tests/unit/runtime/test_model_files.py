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
