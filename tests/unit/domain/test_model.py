"""Models: the slug of a name, and what follows from the fields."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.model import Model, WeightsRef, model_key


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Qwen/Qwen3-8B.v1", "qwen-qwen3-8b-v1"),
        ("smollm2", "smollm2"),
        ("  A  B  ", "a-b"),
        ("--x--", "x"),
        ("a.b*c>d", "a-b-c-d"),
        ("../../etc/passwd", "etc-passwd"),
    ],
)
def test_model_key_by_example(name: str, key: str) -> None:
    assert model_key(name) == key


@given(st.text())
def test_a_key_is_one_token_and_one_file_name_or_there_is_none(name: str) -> None:
    try:
        key = model_key(name)
    except ValueError:
        assert not re.search("[a-z0-9]", name.lower())
    else:
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", key)
        assert model_key(key) == key


@pytest.mark.parametrize("name", ["", "---", "///", "é", " "])
def test_a_name_with_nothing_left_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="letter or digit"):
        model_key(name)


def test_memory_is_weights_and_kv_and_names_are_name_and_aliases() -> None:
    ref = WeightsRef(uri="file:/w")
    model = Model(name="A", key="a", engine="e", weights=ref, weights_bytes=3, kv_bytes=4, aliases=("b", "c"))
    assert model.memory_bytes == 7
    assert model.names == ("A", "b", "c")
