"""Print the states of an instance, drawn from the agent's table: `python docs/instance_states.py`, or `make docs`."""

from collections.abc import Iterable

from glowplug.controllers.agent.record import RULES, State
from glowplug.controllers.agent.table import TABLE
from glowplug.controllers.agent.transaction import Transition

INTRO = """\
# The states of an instance on its node

Printed by `python docs/instance_states.py` from `libs/glowplug/controllers/agent/record.py` and
`libs/glowplug/controllers/agent/table.py`.

The fleet sees the public state of an instance, in parentheses; people read *asleep* for `swapped_out`. The two files
also say which stimulus (a command, the outcome of an effect, or time) leads where. A stimulus without a transition is
late or doubled and changes nothing, or is refused: the controller raises InvalidTransition, which the service logs.

"""


def document() -> str:
    return INTRO + "\n".join((*_states(), ""))


def _states() -> Iterable[str]:
    for state, rule in RULES.items():
        rows = [row for (start, _), row in TABLE.items() if start == state and isinstance(row, Transition)]
        leads = {to for row in rows for to in row.to} - {state}
        yield f"- `{state}` ({rule.public}): {rule.means} → {_names(leads)}"


def _names(states: Iterable[State | None]) -> str:
    order = [None, *State]
    return ", ".join(f"`{state}`" if state else "(no record)" for state in sorted(states, key=order.index))


if __name__ == "__main__":
    print(document(), end="")
