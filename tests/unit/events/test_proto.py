"""Numbers of the wire contract's fields, which no change of a class takes back."""

import pytest

from glowplug.events.proto import numbered, parse

LOCK = parse("Node url 1\nNode zone 2\nNode cpu 3 reserved\n")


def test_a_new_field_has_the_next_number_also_after_a_reserved_one() -> None:
    numbers = numbered(LOCK, {"Node": ["zone", "rack", "url", "row"], "Link": ["node"]})
    assert numbers == {
        ("Node", "url"): (1, False),
        ("Node", "zone"): (2, False),
        ("Node", "cpu"): (3, True),
        ("Node", "rack"): (4, False),
        ("Node", "row"): (5, False),
        ("Link", "node"): (1, False),
    }


def test_the_number_of_a_field_that_is_gone_is_reserved_even_with_its_message() -> None:
    assert numbered(LOCK, {"Node": ["url"]})["Node", "zone"] == (2, True)
    assert numbered(LOCK, {})["Node", "url"] == (1, True)


def test_a_reserved_name_comes_back_under_no_number() -> None:
    with pytest.raises(ValueError, match=r"Node\.cpu is reserved"):
        numbered(LOCK, {"Node": ["url", "zone", "cpu"]})
