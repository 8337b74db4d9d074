"""How conversations are divided for the length model, and what a division is judged by."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.fit.lengths import Answers, Judged, asked, show_shift


def written(folder: Path) -> Path:
    """Forty conversations in two pieces each, and the start of one that is cut off."""
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello there"}]
    pieces = [{"id": f"c{number}_{piece}", "conversations": said} for number in range(40) for piece in (0, 14)]
    path = folder / "conversations.json"
    path.write_text(json.dumps(pieces)[:-1] + ', {"id": "c41_0", "conv')
    return path


def test_all_pieces_of_a_conversation_are_in_one_part(tmp_path: Path) -> None:
    found = list(asked(written(tmp_path)))
    held_out = [one.held_out("a split") for one in found]
    assert len(found) == 80 and held_out[::2] == held_out[1::2] and 0 < sum(held_out) < 40
    assert held_out != [one.held_out("another") for one in found]


def test_answers_are_divided_anew_without_being_read_again(tmp_path: Path) -> None:
    answers = Answers(written(tmp_path), None)
    before = answers.held_out
    answers.divide("another")
    assert (before != answers.held_out).any() and answers.tokens.tolist() == [3] * 80
    said = answers.described(0)
    assert said.words and not said.around and not said.has_answers


def judged(**changed: object) -> Judged:
    parts = {"tokens": [100, 100], "low": [50, 50], "high": [200, 200], "actual": [90, 300], "later": [False, True]}
    return Judged(**{name: np.array(value) for name, value in (parts | changed).items()}, constant=120.0, ms=np.ones(2))


def test_errors_are_beside_those_of_the_constant() -> None:
    one = judged()
    assert one.below() == pytest.approx(1 - 210 / 210) and one.below(~one.later) == pytest.approx(1 - 10 / 30)
    assert one.inside() == 0.5 and one.inside(~one.later) == 1.0
    assert one.cells(~one.later) == "30.0 | 10.0 | 66.7% | 100% / 100% / 100% | 100.0%"


def test_a_model_that_answers_twice_as_long_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    spread = np.arange(40, 240)
    whole = np.full(200, 140)
    one = judged(tokens=whole, low=whole - 80, high=whole + 80, actual=spread, later=np.zeros(200, bool))
    show_shift(one, 2.0)
    lines = capsys.readouterr().out.splitlines()
    first, last = ((line.rpartition(": ")[2]).split("%, ") for line in (lines[13], lines[24]))
    assert lines[13].startswith("1000 before, 0 to 9") and lines[24].startswith("1000 before, 110 to 119")
    assert float(first[0]) < 60 < 75 < float(last[0]) and float(last[1]) == pytest.approx(2.0, abs=0.1)
