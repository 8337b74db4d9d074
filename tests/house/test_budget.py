"""No path that is gone through much does more than it did. Counted, not timed: `python -m bench.budget`."""

from collections import Counter

import pytest

from bench.budget.budget import Budget, read
from bench.budget.cases import CASES
from bench.budget.count import Count


@pytest.mark.parametrize("name", CASES)
def test_a_path_costs_no_more_than_its_budget(name: str) -> None:
    """Where a change is worth more: `python -m bench.budget --write` in its own commit, which says why."""
    excess = read()[name].excess(CASES[name]())
    assert not excess, f"{name}: {excess}"


def test_an_excess_names_what_grew() -> None:
    budget = Budget("abc", 100, 1000, Counter({"a.py": 60, "b.py": 40}))
    assert budget.excess(Count(Counter({"a.py": 60, "b.py": 45}), 1050)) == ""
    found = budget.excess(Count(Counter({"a.py": 50, "b.py": 40, "c.py": 16}), 1051))
    assert found == (
        "106 calls of Python functions; 100 at abc; 1051 bytes at once; 1000 at abc. More calls in c.py (+16)"
    )
