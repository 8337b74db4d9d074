"""Ports for engines out of the agent's range."""

import socket

import pytest
from pydantic import ValidationError

from glowplug.domain.address import PortRange
from glowplug.domain.errors import EngineFailed
from glowplug.runtime.settings import explain
from services.agent.ports import EnginePorts
from services.agent.settings import AgentSettings

HOST = "127.0.0.9"  # nobody else's loopback address: what is free there stays free


def test_without_a_range_the_kernel_chooses() -> None:
    assert EnginePorts(HOST, None).take("i-1", ()) == 0


def test_hands_out_each_port_once_and_in_turn() -> None:
    ports = EnginePorts(HOST, PortRange(21000, 21002))
    assert [ports.take(f"i-{k}", ()) for k in range(3)] == [21000, 21001, 21002]
    with pytest.raises(EngineFailed, match=r"no free port in GLOWPLUG_ENGINE_PORTS=21000-21002: 3 are in use"):
        ports.take("i-3", ())
    ports.settled("i-0")
    assert ports.take("i-3", ()) == 21000
    ports.settled("i-3")
    ports.settled("i-1")
    assert ports.take("i-4", ()) == 21001  # the one after the last: a start that failed gets another
    with pytest.raises(EngineFailed):
        ports.take("i-5", (21000,))  # held by an engine that lives


def test_passes_over_a_port_that_somebody_listens_on() -> None:
    with socket.socket() as other:
        other.bind((HOST, 21010))
        other.listen()
        assert EnginePorts(HOST, PortRange(21010, 21011)).take("i-1", ()) == 21011


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(EngineFailed, match=r"engines cannot listen on 192\.0\.2\.1"):
        EnginePorts("192.0.2.1", PortRange(21000, 21001)).take("i-1", ())


def test_a_wrong_range_is_one_clear_line() -> None:
    with pytest.raises(ValidationError) as caught:
        AgentSettings(engine_ports="9-1")
    assert explain(caught.value).startswith("GLOWPLUG_ENGINE_PORTS: expected first-last")
