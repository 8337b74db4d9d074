"""The shipped length model, invalid files, and sums of trees and heads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug.domain.errors import BadRequest
from glowplug.policies.prediction.length_model import SHIPPED, VERSION, Length, LengthModel
from glowplug.policies.prediction.length_text import NUM_BUCKETS, NUM_NUMBERS, Described, Turn, describe


def parts(**changed: Any) -> dict[str, Any]:
    """One head, raised by the word "long", and one tree: ten tokens, or a hundred where the head is above 0.5."""
    weights = np.zeros((NUM_BUCKETS, 1), np.int8)
    weights[sorted(describe([Turn("long")]).words)] = 100
    leaf = np.float32
    return {
        "version": np.int32(VERSION),
        "weights": weights,
        "scale": np.array([0.01], leaf),
        "bias": np.array([0.0], leaf),
        "feature": np.array([NUM_NUMBERS, 0, 0], np.uint8),
        "limit": np.array([0.5, 0, 0], leaf),
        "left": np.array([1, 1, 2], np.int32),
        "right": np.array([2, 1, 2], np.int32),
        "value": np.array([0, np.log1p(10), np.log1p(100)], leaf),
        "roots": np.array([0], np.int32),
        "depth": np.int32(1),
        "edges": np.array([np.log1p(50)], leaf),
        "low": np.array([[0.5, 0.1], [1, 1]], leaf),
        "high": np.array([[2, 3], [1, 1]], leaf),
    } | changed


def test_heads_trees_and_bands() -> None:
    model = LengthModel(parts())
    short, long = model.expect(describe([Turn("brief")])), model.expect(describe([Turn("long")]))
    assert (short.low, short.tokens, short.high) == (5, 10, 20)
    assert (long.low, long.tokens, long.high) == (10, 100, 300)


def test_words_of_the_texts_before_count_by_themselves() -> None:
    said = describe([Turn("brief"), Turn("long", answers=True), Turn("brief")])
    weights = np.zeros((NUM_BUCKETS, 1), np.int8)
    weights[sorted(said.around)] = 100
    model = LengthModel(parts(weights=weights))
    assert model.expect(said).tokens == 100 and model.expect(describe([Turn("brief")])).tokens == 10


def test_bands_are_by_length_and_by_whether_there_are_answers() -> None:
    model = LengthModel(parts(low=np.array([[0.5, 0.1], [0.25, 0.0]]), high=np.array([[2, 3], [4, 5]])))
    for log, has_answers, length in (
        (np.log1p(50), False, Length(50, 25, 100)),
        (np.log1p(51), False, Length(51, 5, 153)),
        (np.log1p(50), True, Length(50, 12, 200)),
        (np.log1p(51), True, Length(51, 1, 255)),
        (-3.0, False, Length(1, 1, 1)),
        (0.0, True, Length(1, 1, 1)),
        (99.0, False, Length(162754, 16275, 488261)),
    ):
        assert model.length(float(log), has_answers) == length, (log, has_answers)


def test_a_head_is_the_sum_of_its_words_by_the_root_of_their_number() -> None:
    """Four words of 50 make 100, scaled by 0.01; the limit itself is not above it."""
    said = describe([Turn("brief")])
    weights = np.zeros((NUM_BUCKETS, 1), np.int8)
    weights[sorted(said.words)] = 50
    head = 50 * len(said.words) ** 0.5 * 0.01
    for bias, limit, tokens in ((0.0, head - 0.01, 100), (0.0, head + 0.01, 10), (0.02, head + 0.01, 100)):
        changed = parts(weights=weights, limit=np.array([limit, 0, 0], np.float32), bias=np.array([bias], np.float32))
        assert LengthModel(changed).expect(said).tokens == tokens
    assert LengthModel(parts()).expect(describe([Turn("")])).tokens == 10, "of no word"
    single = Described([0.0] * NUM_NUMBERS, {7}, set(), False)
    for weight, tokens in ((51, 100), (49, 10)):
        weights[7] = weight
        assert LengthModel(parts(weights=weights)).expect(single).tokens == tokens
    at_limit = parts(bias=np.array([0.5], np.float32), weights=np.zeros((NUM_BUCKETS, 1), np.int8))
    assert LengthModel(at_limit).expect(said).tokens == 10


def test_a_tree_reads_a_number_of_the_talk_and_trees_add_up() -> None:
    """Feature 0 is log(1 + tokens of the text)."""
    two = parts(feature=np.array([0, 0, 0], np.uint8), limit=np.array([3.0, 0, 0], np.float32)) | {
        "roots": np.array([0, 0], np.int32)
    }
    model = LengthModel(two)
    assert (model.num_trees, model.num_heads) == (2, 1)
    assert [model.of([Turn("a" * num)]).tokens for num in (20, 200)] == [11**2 - 1, 101**2 - 1]
    turned = {"left": np.array([0, 1, 1], np.int32), "right": np.array([0, 1, 0], np.int32)}
    last = parts(**turned, feature=np.array([0, 0, 0], np.uint8), limit=np.array([0, 0, 3.0], np.float32)) | {
        "value": np.array([np.log1p(100), np.log1p(10), 0], np.float32),
        "roots": np.array([2], np.int32),
    }
    assert [LengthModel(last).of([Turn("a" * num)]).tokens for num in (20, 200)] == [10, 100]


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    for broken, why in (
        (parts(version=np.int32(99)), "is of version 99"),
        ({k: v for k, v in parts().items() if k != "roots"}, "lacks roots"),
        (parts(feature=np.array([NUM_NUMBERS + 1, 0, 0], np.uint8)), "reads a feature that does not exist"),
        (parts(weights=np.zeros((5, 1), np.int8)), "have the shape"),
    ):
        with pytest.raises(BadRequest, match=why):
            LengthModel(broken)
    with pytest.raises(BadRequest, match="lacks depth, value"):
        LengthModel({name: part for name, part in parts().items() if name not in ("value", "depth")})
    other = tmp_path / "model.npz"
    for raw in (b"", b"no archive"):
        other.write_bytes(raw)
        with pytest.raises(BadRequest, match=r"model\.npz"):
            LengthModel.read(other)


def test_the_shipped_file_knows_a_long_wish_from_a_short_one() -> None:
    assert SHIPPED.stat().st_size < 3_000_000
    model = LengthModel.read()
    long = model.expect(describe([Turn("Write a detailed essay of 1500 words about the history of printing.")]))
    short = model.expect(describe([Turn("Answer with one word only: is the sea salty?")]))
    assert long.tokens > 3 * short.tokens and long.low < long.tokens < long.high
