"""The bench/gpu scripts, run in host memory."""

import json
from pathlib import Path

import pytest

from bench.gpu import run as bench
from bench.gpu.report import Place, Row, table


def test_mapping_and_copies_run_in_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    assert bench.main(["1", "3", "--kind", "host", "--host-mib", "8", "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "host memory, not a GPU" in printed and "DIFFER" not in printed and "NOT" not in printed
    rows = json.loads(figures.read_text())["rows"]
    assert {row["id"] for row in rows} == {"T0", "T1", "T2", "T3", "T4", "T5", "T11", "T12", "T13"}
    assert not any(row["is_met"] for row in rows), "no figure of host memory meets a criterion of a GPU"
    assert all("not measured" in row["measured"] for row in rows if row["id"] in {"T11", "T12", "T13"})


@pytest.mark.parametrize(
    ("kind", "is_right", "in_time", "verdict"),
    [
        ("cuda", True, True, True),
        ("cuda", True, False, False),
        ("cuda", False, True, False),
        ("host", True, False, None),
    ],
)
def test_times_count_on_a_gpu_alone(kind: str, is_right: bool, in_time: bool, verdict: bool | None) -> None:
    place = Place(kind)
    assert place.met(is_right, in_time=in_time) is verdict
    row = Row("T", "w", "e", "c", "m", verdict)
    assert row.verdict in table([row], place)
