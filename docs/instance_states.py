"""Writes docs/instance-states.md from the agent's table: `python docs/instance_states.py > docs/instance-states.md`."""

import inspect
from collections.abc import Iterable

from glowplug.controllers.agent.record import COMING, DORMANT, ENDED, PARTS, RULES, State
from glowplug.controllers.agent.table import AWAITS, CONSOLIDATION, STIMULI, TABLE
from glowplug.controllers.agent.transaction import Ignored, Transition

INTRO = """\
# The states of an instance on its node

Written by `python docs/instance_states.py > docs/instance-states.md`; change the tables
(`libs/glowplug/controllers/agent/record.py`, `libs/glowplug/controllers/agent/table.py`), not this file.

The agent of a node keeps one record of each instance. What the fleet sees of it is its public state (column *public*);
the agent tells more states apart, since it waits for a process, weights or an answer in each. A stimulus is a command
of the placer or the autoscaler, an outcome of what the agent asked for, or time; what a pair of state and stimulus may
do is one table, which the unit tests, the property tests and the simulator hold against every step.

## States

Parts of a record: `start`, `drain`, `stop` and `consolidation` are what is known of each while it is under way;
`shares` are the bytes that it is granted on each GPU; `snapshot_bytes` is the host memory that its engine sleeps in, or
is to; `engine_id` is the id of the instance whose start it has taken over, until its engine has its own. A record has
no other part. One that has ended has a `stop` while its process is left, and no part afterwards.
"""
TRANSITIONS = """\
## Transitions

Effects in brackets may be asked for. *stays*: the state may be the same afterwards. *nothing*: the stimulus may come
late or twice there, and changes nothing. *refused*: it makes no sense there, since nobody has asked for such an
outcome; the controller raises InvalidTransition with the instance, its state and the stimulus, and the service logs it.
"""
BESIDE = """
## Consolidation, beside `ready` and `draining`

A stage of a pipeline becomes whole while it serves, and while it drains. A running consolidation waits for the outcome
of ConsolidateEngine, an abandoned one for that of AbandonConsolidation. One that finishes, of an engine that has become
whole in another process, waits for that of FinishStages. Another stimulus leaves it as it is; it ends with the state
of the record that it is in.
"""
GROUPS = {"start under way": COMING, "dormant": DORMANT, "ended": ENDED}
EVERYWHERE, UNDER_WAY = (State.FAILED, State.LOST), "start_under_way"  # nearly every state leads to those: not drawn


def document() -> str:
    """The page."""
    return "\n".join((INTRO, *_states(), *_diagram(), *_transitions(), *_consolidation(), ""))


def _states() -> Iterable[str]:
    yield "| state | public | what it means | has | may have | waits for the outcome of |\n|---|---|---|---|---|---|"
    for state, rule in RULES.items():
        has, may = (", ".join(part for part in PARTS if part in parts) for parts in (rule.needs, rule.may))
        awaited = ", ".join(e.__name__ for what in (state, *rule.needs) for e in AWAITS.get(what, ()))
        yield f"| `{state}` | {rule.public} | {rule.means} | {has} | {may} | {awaited} |"
    yield "\nGroups: " + "; ".join(f"*{name}*: {_names(group)}" for name, group in GROUPS.items()) + ".\n"


def _diagram() -> Iterable[str]:
    """What leads from state to state; what leads out of every state of a start, from the start as one."""
    edges: dict[tuple[str, str], list[str]] = {}
    for stimulus in STIMULI:
        rows = {state: row for (state, k), row in TABLE.items() if k is stimulus and isinstance(row, Transition)}
        leads = [(state, after) for state, row in rows.items() for after in row.to if after not in (state, *EVERYWHERE)]
        whole = {after for _, after in leads if all((state, after) in leads for state in COMING)}
        drawn = {(UNDER_WAY if s in COMING and after in whole else s or "[*]", after or "[*]") for s, after in leads}
        for edge in sorted(drawn):
            edges.setdefault(edge, []).append(stimulus.__name__)
    yield f"```mermaid\nstateDiagram-v2\n    state {UNDER_WAY} {{"
    lines = {edge: f"    {edge[0]} --> {edge[1]}: {', '.join(names)}" for edge, names in edges.items()}
    yield from (line for edge, line in lines.items() if COMING.issuperset(edge))
    yield "    }"
    yield from (line for edge, line in lines.items() if not COMING.issuperset(edge))
    yield f"```\n\nWhat leads to {_names(EVERYWHERE)}, from nearly every state, is not drawn.\n"


def _transitions() -> Iterable[str]:
    yield TRANSITIONS + "\n| stimulus | in | may lead to | what happens |\n|---|---|---|---|"
    for stimulus in STIMULI:
        grouped: dict[tuple[str, str], list[State | None]] = {}
        for state in (None, *State):
            if state or (state, stimulus) in TABLE:
                grouped.setdefault(_row(state, stimulus), []).append(state)
        for (to, what), states in sorted(grouped.items(), key=lambda row: row[0][1].startswith("*")):
            yield f"| {stimulus.__name__} | {_group(states)} | {to} | {what} |"


def _row(state: State | None, stimulus: type) -> tuple[str, str]:
    row = TABLE.get((state, stimulus))
    if not isinstance(row, Transition):
        return "", f"*nothing*: {row.why}" if isinstance(row, Ignored) else "*refused*"
    to = ", ".join([_names(row.to - {state}), "*stays*" if state in row.to else ""]).strip(", ")
    said = " ".join((inspect.getdoc(row.does) or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    return to, said + (f" [{', '.join(sorted(e.__name__ for e in row.asks))}]" if row.asks else "")


def _consolidation() -> Iterable[str]:
    yield BESIDE + "\n| stimulus | consolidation | may lead to |\n|---|---|---|"
    for (state, stimulus), to in CONSOLIDATION.items():
        yield f"| {stimulus.__name__} | {state or 'none'} | {', '.join(sorted(one or 'none' for one in to))} |"


def _group(states: Iterable[State | None]) -> str:
    """The states by the groups that they fill, and the rest one by one."""
    left = set(states)
    if left == set(State):
        return "every state"
    full = {name: group for name, group in GROUPS.items() if group <= left}
    rest = left.difference(*full.values())
    return ", ".join([*(f"*{name}*" for name in full), *([_names(rest)] if rest else [])])


def _names(states: Iterable[State | None]) -> str:
    order = [None, *State]
    return ", ".join(f"`{state}`" if state else "(no record)" for state in sorted(states, key=order.index))


if __name__ == "__main__":
    print(document(), end="")
