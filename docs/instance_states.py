"""Writes docs/instance-states.md from the agent's table: `python docs/instance_states.py > docs/instance-states.md`."""

import inspect
from collections.abc import Iterable

from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.record import COMING, DORMANT, ENDING, OVER, PARTS, RULES, State
from glowplug.controllers.agent.table import AWAITS, CONSOLIDATION, STIMULI, TABLE, Ignored, Transition
from glowplug.memory.ledger import ByteLedger

# ruff: noqa: E501 - a row of a table is one line
INTRO = """\
# The states of an instance on its node

Written by `python docs/instance_states.py > docs/instance-states.md`; change the tables
(`libs/glowplug/controllers/agent/record.py`, `libs/glowplug/controllers/agent/table.py`), not this file.

The agent of a node keeps one record of each instance. What the fleet sees of it is its public state (column *public*);
the agent tells more states apart, since it waits for a process, weights or an answer in each. A stimulus is a command of
the placer or the autoscaler, an outcome of what the agent asked for, or time; what a pair of state and stimulus may do
is one table, which the unit tests, the property tests and the simulator hold against every step.
"""
PARTS_INTRO = """\
Parts of a record: `start`, `drain`, `stop` and `consolidation` are what is known of each while it is under way; `shares`
are the bytes that it is granted on each GPU; `snapshot_bytes` is the host memory that its engine sleeps in, or is to;
`engine_id` is the id of the instance whose start it has taken over, until its engine has its own. What is in neither
column, a record does not have.
"""
CONSOLIDATION_INTRO = """\
## Consolidation, beside `ready` and `draining`

A stage of a pipeline becomes whole while it serves, and while it drains. A consolidation ends with the record's state,
whichever it is in.
"""
REFUSED_INTRO = """\
## Refused

Every other pair makes no sense: nobody has asked for such an outcome there. The controller raises InvalidTransition with
the instance, its state and the stimulus, and changes nothing; the service writes it to its log.
"""
OTHERS = (State.FAILING, State.LOSING)  # what nearly every state leads to: in words, not drawn
STARTING = "start_under_way"
GROUPS = {"start under way": COMING, "dormant": DORMANT, "ending": ENDING, "over": OVER}


def document() -> str:
    """The page."""
    return "\n".join((INTRO, *_states(), *_diagram(), *_transitions(), *_consolidation(), *_ignored(), *_refused()))


def _states() -> Iterable[str]:
    yield "## States\n"
    yield PARTS_INTRO
    yield "| state | public | what it means | has | may have | waits for the outcome of |"
    yield "|---|---|---|---|---|---|"
    for state, rule in RULES.items():
        has, may = (_list(part for part in PARTS if part in parts) for parts in (rule.needs, rule.may))
        awaited = _list(effect.__name__ for effect in AWAITS.get(state, ()))
        yield f"| `{state}` | {rule.public} | {rule.means} | {has} | {may} | {awaited} |"
    yield "\nGroups: " + "; ".join(f"*{name}*: {', '.join(_names(group))}" for name, group in GROUPS.items()) + ".\n"


def _diagram() -> Iterable[str]:
    """What leads from state to state; from a start under way as one, where it is the same in each of its states."""
    edges: dict[tuple[str, str], list[str]] = {}
    for stimulus in STIMULI:
        leads = {(state, after) for state in [None, *State] for after in _after(state, stimulus) - {state, *OTHERS}}
        for after in State:
            if {(state, after) for state in COMING} <= leads:
                leads -= {(state, after) for state in COMING}
                edges.setdefault((STARTING, after), []).append(stimulus.__name__)
        for before, after in sorted(leads, key=lambda lead: (_rank(lead[0]), _rank(lead[1]))):
            edges.setdefault((before or "[*]", after or "[*]"), []).append(stimulus.__name__)
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    state {STARTING} {{"
    yield from (_edge(edge, edges) for edge in edges if COMING.issuperset(edge))
    yield "    }"
    yield from (_edge(edge, edges) for edge in edges if not COMING.issuperset(edge))
    yield "```"
    for after in OTHERS:
        stimuli = sorted(k.__name__ for k in STIMULI if any(after in _after(s, k) - {s} for s in State))
        yield f"\nWhat leads to `{after}`, from nearly every state, is not drawn: {', '.join(stimuli)}."
    yield ""


def _after(state: State | None, stimulus: type) -> set[State | None]:
    row = TABLE.get((state, stimulus))
    return set(row.to) if isinstance(row, Transition) else set()


def _edge(edge: tuple[str, str], edges: dict[tuple[str, str], list[str]]) -> str:
    return f"    {edge[0]} --> {edge[1]}: {', '.join(edges[edge])}"


def _transitions() -> Iterable[str]:
    says = {name: _first_sentence(action) for name, action in AgentController("", ByteLedger(()), {}).actions.items()}
    yield "## Transitions\n"
    yield "Effects in brackets may be asked for. *stays*: the state may be the same afterwards.\n"
    yield "| stimulus | in | may lead to | what happens |"
    yield "|---|---|---|---|"
    for stimulus in STIMULI:
        grouped: dict[tuple[str, str, str], list[State | None]] = {}
        for (state, kind), row in TABLE.items():
            if kind is stimulus and isinstance(row, Transition):
                to = _list([*_names(s for s in row.to if s is not state), *(["*stays*"] if state in row.to else [])])
                asks = ", ".join(sorted(effect.__name__ for effect in row.asks))
                grouped.setdefault((to, row.does, asks), []).append(state)
        for (to, does, asks), states in grouped.items():
            what = says[does] + (f" [{asks}]" if asks else "")
            yield f"| {stimulus.__name__} | {_group(states)} | {to} | {what} |"
    yield ""


def _consolidation() -> Iterable[str]:
    yield CONSOLIDATION_INTRO
    yield "| stimulus | consolidation | may lead to | may ask for |"
    yield "|---|---|---|---|"
    for (state, stimulus), (to, asks) in CONSOLIDATION.items():
        after = _list(sorted(f"`{one}`" if one else "none" for one in to))
        before = f"`{state}`" if state else "none"
        yield f"| {stimulus.__name__} | {before} | {after} | {asks.__name__ if asks else ''} |"
    yield ""


def _ignored() -> Iterable[str]:
    yield "## Late, or twice\n"
    yield "These pairs change nothing.\n"
    yield "| stimulus | in | why it may come |"
    yield "|---|---|---|"
    for stimulus in STIMULI:
        grouped: dict[str, list[State | None]] = {}
        for (state, kind), row in TABLE.items():
            if kind is stimulus and isinstance(row, Ignored):
                grouped.setdefault(row.why, []).append(state)
        for why, states in grouped.items():
            yield f"| {stimulus.__name__} | {_group(states)} | {why} |"
    yield ""


def _refused() -> Iterable[str]:
    yield REFUSED_INTRO
    yield "| stimulus | in |"
    yield "|---|---|"
    for stimulus in STIMULI:
        states = [state for state in State if (state, stimulus) not in TABLE]
        if states:
            yield f"| {stimulus.__name__} | {_group(states)} |"
    yield ""


def _group(states: Iterable[State | None]) -> str:
    """The states by the groups that they fill, and the rest one by one."""
    left, out = set(states), []
    if left == set(State):
        return "every state"
    for name, group in GROUPS.items():
        if group <= left:
            out.append(f"*{name}*")
            left -= group
    return ", ".join([*out, *_names(left)])


def _names(states: Iterable[State | None]) -> list[str]:
    return [f"`{state}`" if state else "(no record)" for state in sorted(states, key=_rank)]


def _rank(state: State | None) -> int:
    return [None, *State].index(state)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _first_sentence(action: object) -> str:
    said = " ".join((inspect.getdoc(action) or "").split("\n\n")[0].split())
    return said.partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    print(document(), end="")
