"""The golden table of a tiny scenario."""

from pathlib import Path

from glowplug.cli.terminal import table
from glowplug_lab.commands.simulate import comparison, per_model
from glowplug_lab.simulator.jobs import run_cases
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.sweep import cases, variants
from tests.unit.simulator.scenarios import write

GOLDEN = Path(__file__).parent / "scripts" / "simulated.table"


def rendered(folder: Path) -> str:
    scenario = load(write(folder))
    one = run_cases(cases(dict(scenario.tree), folder, variants(()), (0,)), [None], 1)
    todo = cases(dict(scenario.tree), folder, variants(["models.chat.max_concurrency=1,8"]), (0, 1))
    several = run_cases(todo, [None] * len(todo), 1)
    return "\n\n".join([table(*per_model(one[0])), table(*comparison(one)), table(*comparison(several))]) + "\n"


def test_the_table_is_the_golden_one(tmp_path: Path) -> None:
    found = rendered(tmp_path)
    assert found == GOLDEN.read_text(encoding="utf-8"), f"read the diff; if it is right, write it:\n{found}"
