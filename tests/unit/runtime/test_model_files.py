"""Model files and refusals."""

import json
import re
import struct
from pathlib import Path

import pytest
import yaml

from glowplug.domain.errors import InvalidModelFile, WeightsUnavailable
from glowplug.engines.drivers import installed
from glowplug.engines.samples import sample_weights_path
from glowplug.runtime import model_files
from glowplug.weights.files import NoAnswer
from glowplug.weights.measure import measured
from glowplug.weights.source import SourceFile, SourceInfo, local_path
from tests.split_gguf import write_split

GOOD = """
name: Tiny Chat
engine: emulated
weights_bytes: 300MiB
kv_bytes: 64MiB
keep_alive_s: 2m
aliases: [tiny]
"""

LLAMACPP = "name: a\nengine: llamacpp\nweights_bytes: 300MiB\nweights: http://h/w.gguf\n"
VLLM = "name: a\nengine: vllm\nweights_bytes: 300MiB\nweights: s3://b/w/\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return path


def test_every_engine_may_be_named() -> None:
    for engine in installed():
        weights = {"llamacpp": "http://h/w.gguf", "vllm": "s3://b/w/"}.get(engine, "http://h/w")
        data = {"name": "a", "engine": engine, "weights": weights, "weights_bytes": 1}
        assert model_files.parse(data, "REST").engine == engine


def test_the_model_of_the_page_on_commands_is_one() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", Path("docs/engines/command.md").read_text(), re.DOTALL | re.MULTILINE)
    model = model_files.parse(yaml.safe_load(text), "REST")
    assert (model.engine, model.engine_args["server"], model.weights_bytes) == ("command", "sglang", 15 << 30)


def test_sizes_and_durations_are_read(tmp_path):
    (model,) = model_files.load(write(tmp_path, GOOD))
    assert (model.key, model.weights_bytes, model.keep_alive_s) == ("tiny-chat", 300 * 1024**2, 120.0)
    assert model.names == ("Tiny Chat", "tiny")


def gguf(path: Path, num_bytes: int) -> Path:
    path.write_bytes((b"GGUF" + struct.pack("<IQQ", 3, 0, 0)).ljust(num_bytes, b"\0"))
    return path


def test_a_relative_path_is_taken_from_the_file_and_gives_the_size(tmp_path):
    gguf(tmp_path / "w.gguf", 1234)
    (model,) = model_files.load(write(tmp_path, "name: a\nengine: llamacpp\nweights: w.gguf\n"))
    assert model.weights.uri == f"file:{tmp_path}/w.gguf"
    assert (model.weights_bytes, model.weights.num_bytes) == (1234, 0), (
        "a size not declared is not held against the file"
    )


def test_declared_bytes_are_held_against_a_file_that_can_be_read(tmp_path):
    gguf(tmp_path / "w.gguf", 1234)
    text = "name: a\nengine: llamacpp\nweights: {uri: w.gguf, num_bytes: %d}\n"
    assert model_files.load(write(tmp_path, text % 1234))[0].weights_bytes == 1234
    for wrong in (5, 1235):
        with pytest.raises(
            InvalidModelFile, match=rf"weights.num_bytes: {wrong} is declared, .*w.gguf has 1234"
        ) as found:
            model_files.load(write(tmp_path, text % wrong))
        assert found.value.param == "weights.num_bytes"


def test_a_split_file_is_counted_whole_and_a_part_that_is_missing_is_named(tmp_path):
    sample = sample_weights_path().read_bytes()
    paths = write_split(sample, tmp_path, 3)
    text = "name: a\nengine: llamacpp\nkv_bytes: 64MiB\ncontext_tokens: 1024\nmax_concurrency: 8\n"
    text += "weights: w-0000%d-of-00003.gguf\n"
    (model,) = model_files.load(write(tmp_path, text % 1))
    assert model.weights_bytes == len(sample)
    assert model.max_concurrency == 2, "its KV cache holds no more: the metadata are those of the whole"
    with pytest.raises(InvalidModelFile, match=r"it is part 2 of 3; name the first one, w-00001-of-00003\.gguf"):
        model_files.load(write(tmp_path, text % 2))
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(InvalidModelFile, match="part 3 of 3 says that it is 2 of 3") as found:
        model_files.load(write(tmp_path, text % 1))
    assert found.value.param == "weights"
    paths[2].unlink()
    with pytest.raises(InvalidModelFile, match=r"there is no w-00003-of-00003\.gguf beside it"):
        model_files.load(write(tmp_path, text % 1))


def test_hidden_files_of_a_directory_do_not_count(tmp_path):
    (tmp_path / "repo" / ".cache").mkdir(parents=True)
    (tmp_path / "repo" / ".cache" / "lock").write_bytes(b"x" * 50)
    (tmp_path / "repo" / "model.safetensors").write_bytes(b"x" * 98)
    (tmp_path / "repo" / "config.json").write_text("{}")
    text = "name: a\nengine: vllm\nweights: {uri: repo, num_bytes: 100}\n"
    assert model_files.load(write(tmp_path, text))[0].weights_bytes == 100


def test_the_ledger_is_given_all_of_a_file_that_llamacpp_loads(tmp_path):
    gguf(tmp_path / "w.gguf", 1234)
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
        (GOOD + "max_concurrency: yes\n", "max_concurrency: true or false is no number"),
        (GOOD + "max_concurrency: 010\n", "010 is no plain number"),
        (GOOD + "name: another\n", "name is given twice"),
        (GOOD + "min_instances: 3\n", "min_instances"),
        (GOOD + "num_gpus: 0\n", "num_gpus"),
        (GOOD.replace("emulated", "llamacpp") + "weights: http://x/w\nnum_gpus: 2\n", "num_gpus: llamacpp instances"),
        (GOOD + "weights_shared: true\n", "weights_shared: emulated instances have their weights for themselves"),
        (
            "name: a\nengine: vllm\nweights: http://x/w/\nweights_bytes: 5\nkv_bytes: 0\nweights_shared: true\n",
            "kv_bytes",
        ),
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
        (GOOD + "engine_args: {profil: x}\n", "engine_args.profil is not known to the emulated engine .did you mean"),
        (GOOD + "engine_args: {launch_s: .inf}\n", "engine_args.launch_s cannot be Infinity; allowed is a number from"),
        (GOOD + "engine_args: {faults: {hang: 2}}\n", "engine_args.faults cannot be .* .hang: Expected `bool`"),
        (
            LLAMACPP + "engine_args: {n_thread: 2}\n",
            "engine_args.n_thread .* allowed are cache_type_k, cache_type_v, chat_template, draft",
        ),
        (LLAMACPP + "engine_args: {chat_template: chatml}\n", "not the text of a Jinja template"),
        (LLAMACPP + "engine_args: {mmproj: 7}\n", "engine_args.mmproj cannot be 7; allowed is a text of at most"),
        (LLAMACPP + "engine_args: {pooling: foo}\n", "engine_args.pooling .* allowed is one of none, mean"),
        (VLLM + "engine_args: {port: 1}\n", "engine_args.port is set by the agent"),
        (VLLM + "engine_args: {--dtype: x}\n", "engine_args.--dtype is not the name of an argument"),
        (VLLM + "engine_args: {x: 2024-01-01}\n", "engine_args.x cannot be a date; allowed is text"),
        (VLLM + "engine_args: {num_threads: 0}\n", "engine_args.num_threads cannot be 0; allowed is a whole number"),
        (
            GOOD + "weights: oci:registry/model\n",
            "^weights: no source reads oci: addresses .*file:, http:, https:, hf:, s3:, gs:, sample:$",
        ),
        (GOOD + "weights: oci://registry/model\n", "^weights: no source reads oci: addresses"),
        (GOOD + "weights: OCI://registry/model\n", "^weights: no source reads oci: addresses"),
        (GOOD + "weights: {uri: 'hf://a'}\n", "^weights: hf://a: an address of the hub is hf:org/name, "),
        (GOOD + "weights: gs://bucket/\n", "^weights: .*the address of an object is gs://bucket/key"),
        (GOOD + "weights: s3://bucket\n", "^weights: .*the address of an object is s3://bucket/key"),
        (GOOD + "weights: http:///file\n", "^weights: .*a web address is http://host/path"),
        (GOOD + "weights: https://host\n", "^weights: .*a web address names a file"),
        (GOOD + "weights: http://host:99999/w\n", "^weights: the address cannot be read: Port"),
        (GOOD + "weights: file://host/w\n", "^weights: .*a file address names a path and no host"),
        (GOOD + "weights: 'file:'\n", "^weights: .*a file address names a path"),
        (
            LLAMACPP + "---\n" + LLAMACPP.replace("http://h/w.gguf", "s3://bucket/folder/"),
            "is a directory, and llamacpp",
        ),
        (LLAMACPP.replace("w.gguf", "w.safetensors"), "ends in .safetensors, and llamacpp reads one GGUF file"),
        (VLLM.replace("s3://b/w/", "http://h/w.gguf"), "is a file, and vllm reads a directory with config.json"),
        (VLLM.replace("s3://b/w/", "s3://b/w"), "is a file, and vllm reads a directory"),
        (VLLM.replace("s3://b/w/", "gs://b/w"), "is a file, and vllm reads a directory"),
        (VLLM.replace("s3://b/w/", "hf:o/n:w.gguf"), "hf:o/n:w.gguf is a file, and vllm reads a directory"),
        (LLAMACPP.replace("http://h/w.gguf", "'hf:o/n:*.safetensors'"), "is a directory, and llamacpp reads one GGUF"),
        (VLLM.replace("s3://b/w/", "'sample:smollm2'"), "is not a directory, and vllm reads a directory"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path, text, names):
    with pytest.raises(InvalidModelFile, match=names):
        model_files.load(write(tmp_path, text))


@pytest.mark.parametrize(
    "text", [GOOD, LLAMACPP, VLLM, VLLM + "engine_args: {dtype: float32, max-num-seq-x: [1, a]}\n"]
)
def test_what_an_engine_can_be_asked_for_is_taken(tmp_path: Path, text: str) -> None:
    assert model_files.load(write(tmp_path, text))


HUB = "name: a\nengine: llamacpp\nweights: hf://o/n@main\n"
FOUND = SourceInfo(files=(SourceFile(path="", num_bytes=1234),), ranges=True)


def test_the_size_of_weights_elsewhere_is_asked_where_the_file_does_not_give_it(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(uri: str) -> SourceInfo:
        asked.append(uri)
        return FOUND

    (model,) = model_files.load(write(tmp_path, HUB), measure)
    assert (model.weights.uri, model.weights.num_bytes, model.weights_bytes) == ("hf:o/n", 0, 1234)
    model_files.load(write(tmp_path, HUB + "weights_bytes: 2MiB\n"), measure)
    assert asked == ["hf:o/n"]
    with pytest.raises(InvalidModelFile, match="weights_bytes: give the size"):
        model_files.load(write(tmp_path, HUB))


def test_what_a_source_says_of_its_weights_is_held_against_the_engine(tmp_path: Path) -> None:
    folder = SourceInfo(files=(SourceFile(path="model.safetensors", num_bytes=9),), ranges=True)
    with pytest.raises(InvalidModelFile, match="weights: hf:o/n is a directory, and llamacpp reads one GGUF") as found:
        model_files.load(write(tmp_path, HUB), lambda _: folder)
    assert found.value.param == "weights"

    def refused(param: str) -> str:
        def measure(uri: str) -> SourceInfo:
            raise WeightsUnavailable(f"{uri}: this is why", param=param)

        with pytest.raises(InvalidModelFile, match=r"hf:o/n: this is why") as found:
            model_files.load(write(tmp_path, HUB), measure)
        return found.value.message

    assert refused("weights.uri").startswith("weights_bytes: give the size, it cannot be read from here: ")
    assert refused("weights") == "weights: hf:o/n: this is why", "which of several weights, no size tells"


def test_a_source_that_does_not_answer_is_no_fault_of_the_file() -> None:
    with pytest.raises(NoAnswer, match=r"http://127.0.0.1:9/w"):
        measured("http://127.0.0.1:9/w", timeout_s=0.5)


def test_local_weights_are_of_the_kind_that_the_engine_reads(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(b"PK\3\4" + bytes(1000))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "pytorch_model.bin").write_bytes(b"x")
    for engine, weights, names in (
        ("llamacpp", "w.gguf", "weights: w.gguf: .*not a GGUF file, and llamacpp reads one GGUF file"),
        ("llamacpp", "repo", "weights: they are a directory"),
        ("llamacpp", "empty", "weights: empty is empty"),
        ("emulated", "empty", "weights: empty is empty"),
        ("vllm", "w.gguf", "weights: w.gguf is not a directory"),
        ("vllm", "repo", "weights: repo has no config.json, and vllm reads"),
    ):
        text = f"name: a\nengine: {engine}\nweights: {weights}\nweights_bytes: 300MiB\n"
        with pytest.raises(InvalidModelFile, match=names) as found:
            model_files.load(write(tmp_path, text))
        assert found.value.param == "weights"


def test_a_file_cut_short_is_refused_before_it_is_started(tmp_path: Path) -> None:
    sample = sample_weights_path().read_bytes()[:10_000_000]
    (tmp_path / "w.gguf").write_bytes(sample)
    with pytest.raises(InvalidModelFile, match=r"weights: w.gguf is cut short: 10000000 bytes of \d+, and llamacpp"):
        model_files.load(write(tmp_path, "name: a\nengine: llamacpp\nweights: w.gguf\n"))


def test_more_context_than_the_kv_bytes_hold_is_refused(tmp_path: Path) -> None:
    text = "name: a\nengine: llamacpp\nweights: 'sample:smollm2'\nkv_bytes: 64MiB\nengine_args: {n_ctx: %d}\n"
    with pytest.raises(InvalidModelFile, match=r"engine_args.n_ctx cannot be 2000000000: .* up to 2912$") as found:
        model_files.load(write(tmp_path, text % 2_000_000_000))
    assert found.value.param == "engine_args.n_ctx"
    assert model_files.load(write(tmp_path, text % 2912))


@pytest.mark.parametrize("name", ["a b", "a#1", "a%20b", "a?b", "./a:b", "ä"])
def test_the_name_of_a_file_may_hold_anything(tmp_path: Path, name: str) -> None:
    gguf(tmp_path / name, 1234)
    (model,) = model_files.load(write(tmp_path, f"name: a\nengine: llamacpp\nweights: '{name}'\n"))
    assert model.weights_bytes == 1234
    assert local_path(model.weights.uri) == tmp_path / name, "the prefetcher opens the same file"


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(InvalidModelFile):
        model_files.load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InvalidModelFile):
        model_files.load(tmp_path / "b.yaml")


def test_the_published_schema_is_current_and_accepts_what_the_loader_accepts():
    import jsonschema

    published = json.loads(Path("deploy/models/model.schema.json").read_text())
    assert published == model_files.json_schema()
    jsonschema.validate({"name": "a", "engine": "vllm", "weights": "x", "kv_bytes": "1GiB"}, published)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "a", "engine": "vllm", "colour": "red"}, published)


@pytest.mark.parametrize(
    ("kv_bytes", "asked", "runs"),
    [("140MiB", 8, 6), ("140MiB", 4, 4), ("24MiB", 2, 1), ("0", 8, 8)],  # 22.5 MiB hold 1024 tokens of SmolLM2-135M
)
def test_an_instance_runs_as_many_at_once_as_its_kv_cache_holds_and_deploying_says_so(
    kv_bytes: str, asked: int, runs: int
) -> None:
    data = {"name": "a", "engine": "llamacpp", "weights": "sample:smollm2", "kv_bytes": kv_bytes}
    model = model_files.parse({**data, "context_tokens": 1024, "max_concurrency": asked}, "REST")
    assert model.max_concurrency == runs
    said = model_files.fewer_slots(asked, model)
    assert (f"runs {runs} at once, not {asked}" in said) is (runs < asked)
    assert bool(said) is (runs < asked)
