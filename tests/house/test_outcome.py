"""What `.ci/run` prints last."""

from pathlib import Path

import pytest

from tests import outcome

REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="5" time="1.0">
<testcase classname="tests.unit.a" name="one@tests/unit/a.py" time="0.1"/>
<testcase classname="tests.unit.a" name="two" time="0.1">
<failure message="m">first line\nE  two is wrong</failure></testcase>
<testcase classname="tests.unit.a" name="three" time="0.1"><error message="the fixture broke"/></testcase>
<testcase classname="tests.unit.a" name="four" time="0.1"><skipped message="no GPU"/></testcase>
<testcase classname="tests.unit.a" name="five" time="0.1"/>
</testsuite></testsuites>"""


def test_failures_of_each_lane_stand_before_the_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, system = tmp_path / "fast.xml", tmp_path / "system.xml"
    fast.write_text(REPORT)
    system.write_text(REPORT.replace("two", "six"))
    outcome.main([fast, system])
    said = capsys.readouterr().out
    assert "fast lane, tests.unit.a: two\nfirst line\nE  two is wrong" in said
    assert "system lane, tests.unit.a: three\nthe fixture broke" in said and "E  six is wrong" in said
    assert said.splitlines()[-1] == "lanes: 4 passed, 4 failed, 2 skipped"
