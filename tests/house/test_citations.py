"""Every cited section of a paper exists."""

import re

import pytest

from tests.house.tree import files_in, text

SECTIONS = {
    "WarmServe": "1 2 2.1 2.2 2.3 3 4 4.1 4.2 5 5.1 5.2 6 7 7.1 7.2 7.3 7.4 7.5 8 9",
    "HydraServe": "1 2 2.1 2.2 2.3 3 4 4.1 4.2 5 5.1 5.2 6 6.1 6.2 7 8 8.1 8.2 8.3 8.4 8.5 9 10",
    "mCache": "1 2 2.1 2.2 2.3 3 3.1 3.2 4 4.1 4.2 4.3 4.3.1 4.3.2 4.3.3 4.3.4 5 6 6.1 6.2 6.2.1 6.2.2 6.2.3 6.3 "
    "6.3.1 6.3.2 6.3.3 7 8",
    "SwapServeLLM": "1 2 2.1 2.2 2.3 3 3.1 3.2 3.3 3.4 3.5 4 4.1 4.2 5 5.1 5.2 5.3 6 7 8",
    "PreServe": "1 2 3 3.1 3.1.1 3.1.2 3.2 3.2.1 3.2.2 4 4.1 4.2 4.3 4.3.1 4.3.2 4.3.3 5 5.1 5.2 5.2.1 5.2.2 5.3 5.4 "
    "5.5 6 7 8",
}
NUMBERS = r"(\d+(?:\.\d+)*(?:(?:, | and )\d+(?:\.\d+)+)*)"
PAPER = f"({'|'.join(SECTIONS)})"
IN_TEXT = re.compile(rf"{PAPER}(?:'s)?,? \(?sections? {NUMBERS}")
IN_TABLES = re.compile(rf"(?<=[|(,] ){PAPER} {NUMBERS}(?= \||\)|,)|(?<=\(){PAPER} {NUMBERS}(?=\)|,)")


def cited(page: str) -> list[tuple[str, str]]:
    found = [match.groups() for pattern in (IN_TEXT, IN_TABLES) for match in pattern.finditer(page)]
    pairs = [tuple(part for part in groups if part) for groups in found]
    return [(paper, number) for paper, numbers in pairs for number in re.findall(r"\d+(?:\.\d+)*", numbers)]


def test_citations_are_seen() -> None:
    assert cited("WarmServe section 5.2, Eq. 5") == [("WarmServe", "5.2")]
    assert cited("PreServe sections 4.1 and 4.3.2, Algorithm 2") == [("PreServe", "4.1"), ("PreServe", "4.3.2")]
    assert cited("| `a` | b | WarmServe 5.1, 5.2, 4.1 |") == [("WarmServe", n) for n in ("5.1", "5.2", "4.1")]
    assert cited("| x | baseline (WarmServe 7.1, PreServe 5.3) |") == [("WarmServe", "7.1"), ("PreServe", "5.3")]
    assert cited("mCache takes 4.3") == [] and cited("HydraServe 4.02 s") == []


@pytest.mark.parametrize("suffix", [".py", ".md", ".yaml"])
def test_every_section_that_is_cited_exists(suffix: str) -> None:
    wrong = [
        f"{name}: {paper} has no section {number}"
        for name in files_in("libs", "services", "bench", "docs", "tests", "scenarios", suffix=suffix)
        for paper, number in cited(text(name))
        if number not in SECTIONS[paper].split()
    ]
    assert not wrong, "\n".join(wrong)
