"""Models: slugs and derived fields."""

import json
import pickle
import re
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.bounds import OutOfBounds, Positive, check_bounds
from glowplug.domain.model import Model, Slo, WeightsRef, model_key
from glowplug.runtime.model_files import json_schema
from tests.fleet_builder import an_instance
from tests.strategies import MOST_OF_MODEL as MOST

REF = WeightsRef(uri="file:/w")


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


NO_ENGINE_SEES = {
    "key", "max_queue", "max_wait_s", "keep_alive_s", "min_instances", "max_instances", "on_cold", "pinned", "preload",
    "asleep", "kept_at", "priority", "aliases", "slo", "suspended", "source", "revision", "declared_at", "base",
    "adapter_rank",
}  # fmt: skip
OTHERWISE: dict[str, Any] = {
    "weights": WeightsRef(uri="file:/other"), "slo": Slo(ttft_s=1.0), "aliases": ("x",), "engine_args": {"x": 1},
    "on_cold": "refuse", "kept_at": "asleep", "max_instances": 9,
}  # fmt: skip


@pytest.mark.parametrize("field", [f.name for f in fields(Model) if f.name != "base"])
def test_an_engine_is_outdated_by_a_change_of_what_it_sees_alone(field: str) -> None:
    model = Model(name="A", key="a", engine="e", weights=REF, weights_bytes=3, kv_bytes=4, revision=7)
    is_plain = isinstance(before := getattr(model, field), bool | int | float | str)
    other = OTHERWISE.get(field, None if not is_plain else f"{before}x" if isinstance(before, str) else before + 1)
    changed = replace(model, **{field: not before if isinstance(before, bool) else other})
    assert (changed.engine_digest == model.engine_digest) == (field in NO_ENGINE_SEES)


def test_an_instance_is_outdated_until_its_declaration_comes_back() -> None:
    first = Model(name="A", key="a", engine="e", weights=REF, weights_bytes=3, kv_bytes=4, engine_args={"b": 1, "a": 2})
    first = replace(first, revision=7)
    runs = an_instance(model_revision=7, engine_digest=first.engine_digest)
    assert not runs.is_outdated(first) and not runs.is_outdated(replace(first, revision=9, declared_at=7, priority=1))
    assert runs.is_outdated(replace(first, revision=9, kv_bytes=5))
    assert not runs.is_outdated(replace(first, revision=11, engine_args={"a": 2, "b": 1}))
    assert not an_instance(model_revision=0).is_outdated(replace(first, kv_bytes=5)), "unknown"
    adapter = replace(first, base="b", adapter_rank=8)
    its = an_instance(model_revision=7, engine_digest=adapter.engine_digest)
    assert not its.is_outdated(replace(adapter, revision=9, context_tokens=9))
    assert its.is_outdated(replace(adapter, revision=9, adapter_rank=16))


@pytest.mark.parametrize("name", ["", "---", "///", "é", " "])
def test_a_name_with_nothing_left_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="letter or digit"):
        model_key(name)


def test_memory_is_weights_and_kv_and_names_are_name_and_aliases() -> None:
    model = Model(name="A", key="a", engine="e", weights=REF, weights_bytes=3, kv_bytes=4, aliases=("b", "c"))
    assert model.memory_bytes == 7
    assert model.names == ("A", "b", "c")


def a_model(**fields: Any) -> Model:
    return Model(**{"name": "A", "key": "a", "engine": "e", "weights": REF, "weights_bytes": 3, "kv_bytes": 4} | fields)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("weights_bytes", -1, "-1 is below 0"),
        ("kv_bytes", -1, "-1 is below 0"),
        ("context_tokens", 0, "0 is below 1"),
        ("max_concurrency", 0, "0 is below 1"),
        ("max_queue", -1, "-1 is below 0"),
        ("max_wait_s", -0.1, "-0.1 is below 0"),
        ("max_wait_s", float("nan"), "nan is not a number"),
        ("keep_alive_s", -2, "-2 is below -1"),
        ("min_instances", -1, "-1 is below 0"),
        ("min_instances", 2, "2 is above max_instances, 1"),
        ("max_instances", 0, "0 is below 1"),
        ("num_gpus", 0, "0 is below 1"),
        ("revision", -1, "-1 is below 0"),
    ],
)
def test_a_model_that_nobody_can_mean_is_not_made(field: str, value: float, problem: str) -> None:
    with pytest.raises(OutOfBounds, match=f"^{field}: {problem}$") as raised:
        a_model(**{field: value})
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.field, again.problem) == (field, problem)


def test_neither_are_its_parts_nor_does_one_come_off_the_wire() -> None:
    for make in (lambda: Slo(ttft_s=-1), lambda: Slo(tpot_s=-1), lambda: WeightsRef(uri="", num_bytes=-1)):
        with pytest.raises(OutOfBounds, match="-1 is below 0"):
            make()
    said = json.dumps({**msgspec.to_builtins(a_model()), "max_concurrency": 0})
    with pytest.raises(msgspec.ValidationError, match="max_concurrency: 0 is below 1"):
        msgspec.json.decode(said, type=Model)
    assert a_model(priority=-5, keep_alive_s=-1).priority == -5


def test_a_model_file_allows_nothing_that_a_model_does_not() -> None:
    bounds = {name: said["minimum"] for name, said in json_schema()["properties"].items() if "minimum" in said}
    checked = {name for name in bounds if name not in ("priority", "weights_bytes")}
    assert len(checked) >= 6
    for name in checked:
        a_model(**{name: bounds[name]}, **({} if name == "max_instances" else {"max_instances": 1000}))
        if bounds[name] <= 1:
            with pytest.raises(OutOfBounds, match=name):
                a_model(**{name: bounds[name] - 1})


@pytest.mark.parametrize("name", sorted(MOST))
def test_what_no_owner_can_mean_is_too_much(name: str) -> None:
    told = json_schema()["properties"][name]
    assert told.get("maximum", 0) <= MOST[name], "a model file allows less"
    assert getattr(a_model(**{name: MOST[name]}), name) == MOST[name]
    with pytest.raises(OutOfBounds, match=f"{name}: .* is above"):
        a_model(**{name: MOST[name] + 1})


@dataclass(frozen=True)
class Some:
    rate: float = 1.0
    above: Positive = 1.0
    flag: bool = False
    word: str = "x"


def test_numbers_above_zero_are_so_and_what_is_no_number_is_passed_over() -> None:
    check_bounds(Some(rate=0.0))
    for number in (0.0, -1.0, float("nan")):
        with pytest.raises(OutOfBounds, match=r"above: .* is (not above 0|not a number)"):
            check_bounds(Some(above=number))
