"""proto/ is written from the event classes; their values survive protobuf, and newer output is readable."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event, decode, document, encode
from glowplug.events.envelope import PAYLOADS, from_json, to_json
from glowplug.events.proto import LOCK, written
from tests.strategies import events, values

PROTO = Path(__file__).parents[2] / "proto"
CARRIED = [*PAYLOADS.values(), *document.carried(list(PAYLOADS.values()))]
few = settings(max_examples=6)
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


def test_the_contract_is_as_generated() -> None:
    """`make proto` writes it."""
    by_hand = {"glowplug/v1/options.proto"}
    files_ = {str(p.relative_to(PROTO)): p.read_text() for p in [PROTO / LOCK, *PROTO.rglob("*.proto")]}
    assert {path: text for path, text in files_.items() if path not in by_hand} == written(files_[LOCK])


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
