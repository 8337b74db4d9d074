"""Divisions of conversations for the length model."""

import json
from pathlib import Path

import numpy as np

from bench.fit.lengths import Answers, Judged, asked


def written(folder: Path) -> Path:
    """Forty conversations in two pieces each, and a truncated one."""
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
    assert one.inside() == 0.5 and one.inside(~one.later) == 1.0
    assert one.cells(~one.later) == "30.0 | 10.0 | 66.7% | 100% / 100% / 100% | 100.0%"
