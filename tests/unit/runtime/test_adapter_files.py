"""Model files of LoRA adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.controllers.autoscaler.adapting import on_base
from glowplug.domain.errors import InvalidModelFile
from glowplug.runtime import model_forms
from glowplug.runtime.model_files import parse
from tests import adapters
from tests.fleet_builder import a_model

TINY = adapters.make(1, 4, adapters.Shape(layers=1, hidden=8, heads=2, kv_heads=1, ffn=16), ("attn_q", "ffn_down"))
BASE = {"name": "Base", "engine": "emulated", "aliases": ["b one"], "context_tokens": 512, "weights_bytes": 1}


def test_a_lora_adapter_has_its_rank_from_its_own_files_and_the_rest_from_its_base(tmp_path: Path) -> None:
    peft, gguf = adapters.write_peft(TINY, tmp_path / "peft"), adapters.write_gguf(TINY, tmp_path / "poet.gguf")
    base = parse(BASE, "x")
    for path, engine in ((peft, "vllm"), (gguf, "llamacpp")):
        found = parse({"name": "Poet", "base": "b one", "adapter": str(path), "aliases": ["p"]}, "x")
        assert (found.engine, found.adapter_rank, found.kv_bytes) == (engine, 4, 0)
        assert found.weights_bytes == found.weights.num_bytes > 0
        model = on_base(found, {"base": replace(base, engine=engine)}, [])
        assert (model.base, model.context_tokens, model.aliases) == ("base", 512, ("p",))
        assert parse(model_forms.fields_of(model), "x").adapter_rank == 4, "a form shows what can be deployed"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"base": "base"}, "adapter"),
        ({"adapter": "peft"}, "base"),
        ({"base": "base", "adapter": "peft", "kv_bytes": 1}, "kv_bytes"),
        ({"base": "base", "adapter": "peft", "engine": "llamacpp"}, "adapter"),
        ({"base": "base", "adapter": "empty"}, "adapter"),
        ({"base": "base", "adapter": "hf:org/poet"}, "adapter"),
        ({"base": "gone", "adapter": "peft"}, "base"),
        ({"base": "poet", "adapter": "peft"}, "base"),
        ({"base": "other", "adapter": "peft"}, "adapter"),
    ],
)
def test_an_adapter_that_can_never_start_is_refused(tmp_path: Path, given: dict[str, Any], field: str) -> None:
    adapters.write_peft(TINY, tmp_path / "peft")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidModelFile) as refused:
        found = parse({"name": "Poet", **given}, "x", tmp_path)
        others = {key: a_model(key, engine=engine) for key, engine in (("base", "vllm"), ("other", "llamacpp"))}
        on_base(found, others | {"poet": found}, [])
    assert refused.value.param == field
