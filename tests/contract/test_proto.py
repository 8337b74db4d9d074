"""proto/glowplug/v1 is the wire contract: event classes mirror it, and output of a newer version is readable."""

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event, decode, document, encode
from glowplug.events.envelope import COMMANDS, PAYLOADS, from_json, to_json
from glowplug.events.subjects import is_telemetry
from tests.strategies import events, values

PROTO = Path(__file__).parents[2] / "proto"
KINDS = {
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_INT64: "integer",
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_BOOL: "bool",
}
CARRIED = [*PAYLOADS.values(), *document.carried(list(PAYLOADS.values()))]
few = settings(max_examples=10)
FUTURE = {"from_the_future": {"deep": [1, 2, 3]}}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pool.DescriptorPool:
    out = tmp_path_factory.mktemp("proto") / "set.binpb"
    sources = sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))
    well_known = str(files("grpc_tools") / "_proto")
    argv = ["protoc", f"-I{PROTO}", f"-I{well_known}", "--include_imports", f"--descriptor_set_out={out}", *sources]
    assert protoc.main(argv) == 0
    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    made = descriptor_pool.DescriptorPool()
    for file in compiled.file:
        made.Add(file)
    return made


def descriptor_of(pool: descriptor_pool.DescriptorPool, name: str) -> Descriptor:
    return pool.FindMessageTypeByName(f"glowplug.v1.{name}")


def messages(pool: descriptor_pool.DescriptorPool) -> set[str]:
    paths = [str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto")]
    return {name for path in paths for name in pool.FindFileByName(path).message_types_by_name}


def kind_of_hint(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return f"list of {kind_of_hint(args[0])}"
    if origin is Mapping:
        return "object" if args[1] is Any else f"map of {kind_of_hint(args[0])} to {kind_of_hint(args[1])}"
    if origin is UnionType:
        return "value"
    if dataclasses.is_dataclass(hint):
        return str(getattr(hint, "__name__", hint))
    if hint is Any:
        return "object"
    return "text" if issubclass(hint, StrEnum) else {str: "text", int: "integer", float: "number", bool: "bool"}[hint]


def kind_of_field(field: FieldDescriptor) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[n] for n in ("key", "value"))
        return f"map of {kind_of_field(key)} to {kind_of_field(value)}"
    if field.message_type is not None:
        known = {"google.protobuf.Struct": "object", "google.protobuf.Value": "value"}
        kind = known.get(field.message_type.full_name, field.message_type.name)
    else:
        kind = KINDS[field.type]
    return f"list of {kind}" if field.is_repeated else kind


def options(pool: descriptor_pool.DescriptorPool, descriptor: Descriptor) -> dict[str, str]:
    cls = message_factory.GetMessageClass(pool.FindMessageTypeByName("google.protobuf.MessageOptions"))
    set_ = cls.FromString(descriptor.GetOptions().SerializeToString())
    return {field.name: value for field, value in set_.ListFields() if field.is_extension}


def test_a_class_and_its_message_have_the_same_fields(pool: descriptor_pool.DescriptorPool) -> None:
    for cls in [*CARRIED, Event]:
        ours = {f.name: kind_of_hint(f.hint) for f in document.fields(cls)}
        theirs = {f.name: kind_of_field(f) for f in descriptor_of(pool, cls.__name__).fields}
        assert theirs == ours, cls


def test_no_message_is_without_a_class(pool: descriptor_pool.DescriptorPool) -> None:
    assert messages(pool) == {cls.__name__ for cls in [*CARRIED, Event]}


def test_a_message_names_its_event_type_and_plane(pool: descriptor_pool.DescriptorPool) -> None:
    for cls in PAYLOADS.values():
        plane = "cmd" if cls.TYPE in COMMANDS else "tel" if is_telemetry(cls.TYPE) else "evt"
        assert options(pool, descriptor_of(pool, cls.__name__)) == {"event_type": cls.TYPE, "plane": plane}


def test_the_listed_words_of_each_enumeration_are_the_real_ones() -> None:
    text = " ".join((PROTO / "glowplug/v1/domain.proto").read_text().split())
    for cls in CARRIED:
        for field in document.fields(cls):
            if isinstance(field.hint, type) and issubclass(field.hint, StrEnum):
                words = ", ".join(member.value for member in field.hint)
                assert re.search(rf"string {field.name} = \d+; // [^/]*one of: {words}\b", text), (cls, field.name)


def through_proto(pool: descriptor_pool.DescriptorPool, name: str, raw: bytes) -> str:
    message = message_factory.GetMessageClass(descriptor_of(pool, name))()
    json_format.Parse(raw.decode(), message, descriptor_pool=pool)
    return json_format.MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, descriptor_pool=pool
    )


@pytest.mark.parametrize("cls", CARRIED, ids=lambda cls: cls.__name__)
@few
@given(data=st.data())
def test_a_value_survives_protobuf(pool: descriptor_pool.DescriptorPool, cls: type[Any], data: st.DataObject) -> None:
    value = data.draw(values(cls))
    assert from_json(through_proto(pool, cls.__name__, to_json(value)).encode(), cls) == value


@few
@given(event=st.sampled_from(sorted(PAYLOADS)).flatmap(lambda name: events(PAYLOADS[name])))
def test_an_envelope_survives_protobufs_json(pool: descriptor_pool.DescriptorPool, event: Event) -> None:
    """The envelope's `data` is a Struct, which needs no descriptor."""
    again = decode(through_proto(pool, "Event", encode(event)).encode())
    assert again == event


def with_future(raw: bytes, *path: str) -> bytes:
    """With an extra field in its outermost object and in each on `path`."""
    document = json.loads(raw)
    for step in ((), *(path[:i] for i in range(1, len(path) + 1))):
        inner = document
        for name in step:
            inner = inner[name]
        inner.update(FUTURE)
    return json.dumps(document).encode()


@pytest.mark.parametrize("name", sorted(PAYLOADS))
def test_an_event_with_more_fields_is_the_event(name: str) -> None:
    @few
    @given(events(PAYLOADS[name]))
    def check(event: Any) -> None:
        assert decode(with_future(encode(event), "data")) == event

    check()


@pytest.mark.parametrize("cls", [Model, Instance, Node])
def test_a_row_with_more_fields_is_the_row(cls: type[Any]) -> None:
    @few
    @given(values(cls))
    def check(row: Any) -> None:
        assert from_json(with_future(to_json(row)), cls) == row

    check()
