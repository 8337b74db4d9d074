"""Tables, sizes and ages as a person reads them."""

import json

import pytest

from glowplug.cli.terminal import Format, age, emit, seconds, table


def test_columns_line_up_and_numbers_stand_right() -> None:
    text = table(("name", "count"), [("a", 5), ("longer", 1234)])
    assert text.splitlines() == ["NAME    COUNT", "a           5", "longer   1234"]


def test_a_table_without_rows_is_its_header() -> None:
    assert table(("name",), []) == "NAME"


@pytest.mark.parametrize(("passed", "shown"), [(-3, "0s"), (59, "59s"), (150, "2m"), (7200, "2h"), (200_000, "2d")])
def test_ages(passed: float, shown: str) -> None:
    assert age(passed) == shown


def test_no_time_is_a_dash_and_zero_is_not() -> None:
    assert (seconds(None), seconds(0.0)) == ("-", "0.000 s")


def test_json_is_the_value_and_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Format.JSON, {"a": [1]}, (), ())
    assert json.loads(capsys.readouterr().out) == {"a": [1]}
    emit(Format.TABLE, [], ("a",), [], "no model is deployed")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "no model is deployed\n")
