"""Load untrusted YAML within bounds, checked before construction.

Aliases let a few hundred bytes mean a billion values, so each counts as many values as it names. Refused is also what a
person may read in another way: a key given twice, and 010 or 1:30, which YAML 1.1 takes for 8 and 90.
"""

import re
from typing import Any, Final

import yaml

MAX_CHARS: Final = 8 << 20
MAX_VALUES: Final = 100_000  # mappings, lists, keys and scalars, including aliased ones
MAX_DEPTH: Final = 64
_PLAIN_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)")


class _Loader(yaml.SafeLoader):
    """Counts during parsing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._num_values = 0
        self._sizes: dict[int, int] = {}  # of complete nodes, by identity

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise _refused("a value refers to itself", event)
            self._count(self._sizes[id(node)], event)
            return node
        before = self._num_values
        self._count(1, event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(f"values are nested more than {MAX_DEPTH} deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes[id(node)] = self._num_values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len({*keys}) < len(keys):
            raise _refused(f"{max(keys, key=keys.count)} is given twice", event)
        return node

    def construct_yaml_int(self, node: Any) -> Any:
        if not _PLAIN_INT.fullmatch(node.value):
            raise _refused(f"{node.value} is no plain number", node)
        return super().construct_yaml_int(node)

    def _count(self, num: int, event: yaml.Event) -> None:
        self._num_values += num
        if self._num_values > MAX_VALUES:
            raise _refused(f"with its aliases it holds more than {MAX_VALUES} values", event)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refused(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    mark: Any = at.start_mark
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def load_all(text: str) -> list[Any]:
    """All documents, nulls included. Raises yaml.YAMLError, also beyond the bounds and for impossible values (the 31st
    of a February)."""
    if len(text) > MAX_CHARS:
        raise yaml.YAMLError(f"{len(text)} characters are more than {MAX_CHARS}")
    loader = _Loader(text)
    found = []
    try:
        while loader.check_data():  # type: ignore[no-untyped-call]
            found.append(loader.get_data())
    except (ValueError, OverflowError, RecursionError) as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    finally:
        loader.dispose()
    return found


def load(text: str) -> Any:
    """The only document, or None. Raises yaml.YAMLError."""
    documents = load_all(text)
    if len(documents) > 1:
        raise yaml.YAMLError("there is more than one document in it")
    return documents[0] if documents else None
