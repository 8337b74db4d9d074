"""No frequent path does more work than before. Counted, not timed: `python -m bench.budget`."""

from collections import Counter

import pytest

from bench.budget.budget import Budget, read
from bench.budget.cases import CASES
from bench.budget.count import Count


@pytest.mark.parametrize("name", CASES)
def test_a_path_costs_no_more_than_its_budget(name: str) -> None:
    """`python -m bench.budget --write` raises one, in its own commit that says why."""
    excess = read()[name].excess(CASES[name]())
    assert not excess, f"{name}: {excess}"


def test_an_excess_names_what_grew() -> None:
    budget = Budget("abc", 100, 1000, Counter({"a.py": 60, "b.py": 40}))
    assert budget.excess(Count(Counter({"a.py": 60, "b.py": 45}), 1050)) == ""
    found = budget.excess(Count(Counter({"a.py": 50, "b.py": 40, "c.py": 16}), 1051))
    assert found == (
        "106 calls of Python functions; 100 at abc; 1051 bytes at once; 1000 at abc. More calls in c.py (+16)"
    )
