"""A model file as a form."""

from pathlib import Path

import pytest

from glowplug.domain.errors import InvalidModelFile
from glowplug.runtime import model_forms
from glowplug.runtime.model_files import load, parse

GIVEN = {
    "name": "Org/Tiny.1",
    "engine": "emulated",
    "weights_bytes": "10MiB",
    "aliases": ["tiny"],
    "slo": {"ttft_s": 10.0},
    "system_prompt": "Answer\nbriefly.\n",
    "engine_args": {"profile": "qwen2.5-7b/a100"},
}


def test_the_fields_of_a_deployed_model_declare_the_same_model() -> None:
    model = parse(GIVEN, "api")
    fields = model_forms.fields_of(model)
    assert fields == GIVEN
    assert parse(model_forms.read(model_forms.written(fields)), "api") == model


@pytest.mark.parametrize("path", sorted(Path("deploy/models/emulated").glob("*.yaml")), ids=lambda path: path.stem)
def test_models_of_the_repository_survive_the_way_through_a_form(path: Path) -> None:
    for model in load(path):
        assert parse(model_forms.read(model_forms.written(model_forms.fields_of(model))), model.source) == model


def test_yaml_has_the_order_of_the_schema_and_keeps_what_it_does_not_know() -> None:
    text = model_forms.written({"later": 1, "engine_args": {"b": 1, "a": 2}, "engine": "emulated", "name": "x"})
    assert text == "name: x\nengine: emulated\nengine_args:\n  b: 1\n  a: 2\nlater: 1\n"


def test_every_wrong_field_is_named_once() -> None:
    given = {
        "name": "",
        "engine": "none",
        "kv_bytes": "much",
        "slo": {"ttft_s": -1},
        "colour": 1,
        "weights": {"url": ""},
    }
    file, faults = model_forms.check_fields(given)
    assert file is None
    found = {fault.field: fault.message for fault in faults}
    assert list(found) == ["name", "engine", "weights.uri", "weights.url", "kv_bytes", "slo.ttft_s", "colour"]
    assert found["kv_bytes"] == "not a size in bytes: 'much' (try 512MiB, 1GiB, 24GB)"
    assert found["colour"] == "there is no such key"


def test_weights_that_are_no_text_are_one_fault() -> None:
    _, faults = model_forms.check_fields({"name": "a", "engine": "emulated", "weights": 3})
    assert [fault.field for fault in faults] == ["weights"]


@pytest.mark.parametrize(("text", "said"), [("name: [", "line 1"), ("- a", "name: value"), ("", "name: value")])
def test_a_text_that_is_no_mapping_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidModelFile, match=said):
        model_forms.read(text)


def test_a_refusal_is_the_fault_of_the_field_it_names() -> None:
    fault = model_forms.fault_of(InvalidModelFile("weights: engine vllm needs them", param="weights"))
    assert (fault.field, fault.message) == ("weights", "engine vllm needs them")
    assert model_forms.fault_of(InvalidModelFile("no")).field == model_forms.WHOLE
