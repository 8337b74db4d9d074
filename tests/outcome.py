"""What the lanes came to: `python -m tests.outcome LANE.xml ...` prints from pytest's reports what failed, shortly, and
how many tests passed. A long run's output is often cut, and what its first lane said with it."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests import lanes

MOST_LINES = 25  # of one failure: the last ones


def failures(path: Path) -> list[str]:
    """Return one text for each failed test of a report of pytest's --junitxml. Raises OSError, ET.ParseError."""
    return [
        f"{path.stem} lane, {case.get('classname', '')}: {lanes.without_group(case.get('name', ''))}\n"
        + "\n".join((outcome.text or outcome.get("message") or "").splitlines()[-MOST_LINES:])
        for case in ET.parse(path).iter("testcase")
        for outcome in case
        if outcome.tag in ("failure", "error")
    ]


def counts(path: Path) -> tuple[int, int, int]:
    """Return (passed, failed, skipped) of a report; an error counts as a failure. Raises as `failures` does."""
    suite = next(ET.parse(path).iter("testsuite"))
    tests, failed, skipped = (
        sum(int(suite.get(name, 0)) for name in names) for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return tests - failed - skipped, failed, skipped


def main(paths: list[Path]) -> None:
    for text in (text for path in paths for text in failures(path)):
        print(f"\n{text}")
    passed, failed, skipped = (sum(of) for of in zip(*map(counts, paths), strict=True))
    print(f"\nlanes: {passed} passed, {failed} failed, {skipped} skipped")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
