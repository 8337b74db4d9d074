"""The tree weighs no more than tests/weight.txt allows."""

from tests import weight

ROW = {"lines": 100, "prose": 120.0, "what": 2.0}


def test_no_number_has_risen() -> None:
    more = list(weight.excess(weight.table(), weight.read(weight.HELD.read_text())))
    assert not more, "`make weight ARGS=--write` in a commit of its own that says what for"


def test_a_table_is_read_as_it_was_written() -> None:
    rows = {"libs/a": {"lines": 12345, "prose": 1.5, "what": 0.0}, "the product": ROW, "Markdown": {"words": 7}}
    assert weight.read(weight.render(rows)) == rows


def test_what_is_held_leaves_room_for_a_small_change() -> None:
    assert weight.ceilings({"a": {"lines": 101, "prose": 10.2, "what": 1.1}, "settings": {"count": 7}}) == {
        "a": {"lines": 200, "prose": 11, "what": 1.5},
        "settings": {"count": 7},
    }


def test_what_rises_is_named() -> None:
    held = {"a": ROW}
    assert list(weight.excess({"a": ROW}, held)) == []
    assert list(weight.excess({"a": ROW | {"what": 3.0, "lines": 99}}, held)) == []  # the aim is 3
    assert list(weight.excess({"a": ROW | {"what": 3.1}}, held)) == ["a: what 3.1, held at 2.0"]
    assert list(weight.excess({"a": ROW | {"prose": 120.1}}, held)) == ["a: prose 120.1, held at 120.0"]
    assert list(weight.excess({"a": ROW | {"lines": 794}}, {"a": ROW | {"lines": 1000}})) == [
        "a: lines 794, held at 1,000"
    ]
    assert list(weight.excess({"b": {"lines": 1}}, held)) == ["b: lines 1, held at 0"]


def test_prose_is_docstrings_and_comments_without_marks() -> None:
    said = weight.of_python("tests/house/test_weight.py")
    assert "The tree weighs no more" in said
    assert "the aim is 3" in said
    assert "held at" not in said
